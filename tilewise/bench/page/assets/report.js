// Reading a chart: the mark that is pointed at or stepped to is shown as its row of the section's table.

const reading = document.getElementById("reading");
const REACH = 36; // pixels between the pointer and the mark it means
let marked = null;

const middle = (mark) => {
  const box = mark.getBoundingClientRect();
  return { x: box.left + box.width / 2, y: box.top + box.height / 2, box };
};

function distance(mark, x, y) {
  const { box } = middle(mark);
  return Math.hypot(Math.max(box.left - x, x - box.right, 0), Math.max(box.top - y, y - box.bottom, 0));
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function show(mark) {
  const row = document.getElementById(mark.dataset.row);
  const names = [...row.closest("table").tHead.rows[0].cells].map((cell) => cell.textContent);
  const cells = [...row.cells].map((cell) => cell.textContent);
  const list = document.createElement("dl");
  for (let at = 2; at < cells.length; at++)
    if (cells[at].trim() !== "") list.append(element("dt", names[at]), element("dd", cells[at]));
  reading.replaceChildren(element("strong", cells[1]), element("p", cells[0]), list);
  reading.hidden = false;
  place(mark);
  marked?.classList.remove("read");
  marked = mark;
  mark.classList.add("read");
}

// Beside the mark, and inside the window.
function place(mark) {
  const { box } = middle(mark);
  const { width, height } = reading.getBoundingClientRect();
  const within = (at, size, room) => Math.max(4, Math.min(at, room - size - 4));
  const right = box.right + 14;
  const left = right + width < innerWidth ? right : box.left - width - 14;
  reading.style.left = `${within(left, width, innerWidth)}px`;
  reading.style.top = `${within(box.top - height - 8, height, innerHeight)}px`;
}

function hide() {
  reading.hidden = true;
  marked?.classList.remove("read");
  marked = null;
}

function point(event) {
  const marks = [...event.currentTarget.querySelectorAll("[data-row]")];
  const near = marks
    .map((mark) => ({ mark, off: distance(mark, event.clientX, event.clientY) }))
    .reduce((best, next) => (next.off < best.off ? next : best), { mark: null, off: REACH });
  if (near.mark === null) hide();
  else if (near.mark !== marked) show(near.mark);
}

// Along a line by ← and →, to another line by ↑ and ↓; bars and tables in their order.
const STEPS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

function step(event) {
  if (event.key === "Escape") return hide();
  const by = STEPS[event.key];
  if (by === undefined) return;
  const marks = [...event.currentTarget.querySelectorAll("[data-row]")];
  const here = marks.includes(marked) ? marked : null;
  event.preventDefault();
  const first = event.currentTarget.querySelector(".ours [data-row]") ?? marks[0];
  show(here === null ? first : (next(marks, here, by) ?? here));
}

function next(marks, here, [across, down]) {
  const line = marks.filter((mark) => mark.parentElement === here.parentElement);
  if (line.length === 1) return marks[marks.indexOf(here) + across + down];
  if (across !== 0) return line[line.indexOf(here) + across];
  const { x, y } = middle(here);
  const beside = marks.filter((mark) => Math.abs(middle(mark).x - x) < 3 && (middle(mark).y - y) * down > 0);
  return beside.sort((a, b) => Math.abs(middle(a).y - y) - Math.abs(middle(b).y - y))[0];
}

for (const chart of document.querySelectorAll("svg.chart, table.heat")) {
  chart.addEventListener("pointermove", point);
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointerleave", hide);
}
for (const chart of document.querySelectorAll("svg.chart")) {
  chart.addEventListener("keydown", step);
  chart.addEventListener("blur", () => chart.contains(marked) && hide());
}
// What the keyboard has chosen stays; what was pointed at is elsewhere now.
addEventListener("scroll", () => (document.activeElement?.contains(marked) ? place(marked) : hide()), { passive: true });
document.getElementById("theme").addEventListener("click", switchTheme);
