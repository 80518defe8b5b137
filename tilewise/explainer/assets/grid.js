// The grid of tiles: coloured by kind, in PARTIAL ones score by score, with the tile at work framed.

const KINDS = {
  FULL: "every key counts: no mask code",
  PARTIAL: "some keys count: masked",
  EMPTY: "no key counts: skipped, never loaded",
};

function buildGrid() {
  const { nQ, nK } = call();
  const colours = { FULL: rgb("--full"), PARTIAL: rgb("--partial"), EMPTY: rgb("--empty") };
  const kinds = new Array(nQ * nK);
  steps().forEach((step, at) => {
    const queries = queriesOf(step.i),
      keys = keysOf(step.j),
      numbers = numbersOf(at);
    for (let r = 0; r < queries.count; r++)
      for (let c = 0; c < keys.count; c++) {
        const masked = step.kind === "PARTIAL" && numbers.s[r * keys.count + c] === -Infinity;
        kinds[(queries.first + r) * nK + keys.first + c] = masked ? "EMPTY" : step.kind;
      }
  });
  paint(byId("grid"), nQ, nK, (at) => colours[kinds[at]]);
  byId("map").style.setProperty("--ratio", Math.min(Math.max(nK / nQ, 0.6), 6)); // one query is a band, not a hair
  buildGridMarks();
  const count = (kind) => steps().filter((step) => step.kind === kind).length;
  byId("kinds").replaceChildren(
    ...Object.entries(KINDS).map(([kind, meaning]) =>
      element(
        "li",
        {},
        element("i", { class: `swatch ${kind.toLowerCase()}` }),
        element("b", {}, `${count(kind)} ${kind}`),
        ` ${meaning}`,
      ),
    ),
  );
}

function buildGridMarks() {
  const { nQ, nK, tileQ, tileK } = call();
  const marks = byId("grid-marks");
  marks.setAttribute("viewBox", `0 0 ${nK} ${nQ}`);
  marks.setAttribute("preserveAspectRatio", "none");
  const lines = [];
  for (let x = tileK; x < nK; x += tileK) lines.push(element("line", { x1: x, x2: x, y1: 0, y2: nQ }));
  for (let y = tileQ; y < nQ; y += tileQ) lines.push(element("line", { x1: 0, x2: nK, y1: y, y2: y }));
  const veils = ["veil-row", "veil-below"].map((id) => element("rect", { id, class: "veil" }));
  marks.replaceChildren(...veils, ...lines, element("rect", { id: "here", class: "here" }));
}

function place(id, x, y, width, height) {
  const box = byId(id);
  for (const [name, value] of Object.entries({ x, y, width, height })) box.setAttribute(name, Math.max(value, 0));
}

function showGrid() {
  const { nQ, nK } = call(),
    { i, j, kind } = stepNow();
  const queries = queriesOf(i),
    keys = keysOf(j),
    end = keys.first + keys.count;
  // Half a score more, or the edge of the last row would shine through.
  place("veil-row", end, queries.first, nK - end, queries.count);
  place("veil-below", 0, queries.first + queries.count, nK, nQ - queries.first - queries.count + 0.5);
  place("here", keys.first, queries.first, keys.count, queries.count);
  byId("grid").setAttribute("aria-label", `The grid of tiles; at query tile ${i}, key tile ${j}, which is ${kind}`);
}

function tileAt(event) {
  const box = byId("grid").getBoundingClientRect();
  const i = Math.floor((((event.clientY - box.top) / box.height) * call().nQ) / call().tileQ);
  const j = Math.floor((((event.clientX - box.left) / box.width) * call().nK) / call().tileK);
  return steps().findIndex((step) => step.i === i && step.j === j);
}
