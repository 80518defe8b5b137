// The tile at work: scores, mask and weights as heatmaps, and what overflows where nothing is subtracted.

const LARGEST = { float16: 65504, float32: 3.4028234663852886e38 };
const overflows = (s) => Math.exp(s) > LARGEST[view.type];

function showTile() {
  const { i, j, kind } = stepNow(),
    queries = queriesOf(i),
    keys = keysOf(j),
    numbers = numbersOf(view.at);
  const range = (part) => `${part.first} to ${part.first + part.count - 1}`;
  byId("work-note").textContent =
    `Queries ${range(queries)}, keys ${range(keys)}.` +
    (numbers === null ? " No key counts for any of these queries: nothing is loaded, nothing computed." : "");
  byId("work").classList.toggle("skipped", numbers === null);
  for (const id of ["heat-s", "heat-mask", "heat-p"])
    byId(id).style.aspectRatio = Math.min(Math.max(keys.count / queries.count, 0.6), 3);
  if (numbers === null) {
    for (const id of ["heat-s", "heat-mask", "heat-p"])
      paint(byId(id), queries.count, keys.count, () => rgb("--empty"));
    for (const id of ["scale-s", "scale-mask", "scale-p"]) byId(id).textContent = "skipped";
  } else {
    showScores(numbers, queries.count, keys.count);
    showMask(numbers, queries.count, keys.count);
    showWeights(numbers, queries.count, keys.count);
  }
  byId("p-caption").replaceChildren(
    view.subtracts ? "weights " : "without the maximum: ",
    element("code", {}, view.subtracts ? "p" : "exp(s)"),
  );
  byId("cell").textContent = numbers === null ? "" : "Point at a score to read it.";
}

function showScores(numbers, rows, columns) {
  const seen = numbers.s.filter(Number.isFinite),
    masked = rgb("--masked"),
    colour = ramp("scores");
  const reach = seen.reduce((most, x) => Math.max(most, Math.abs(x)), 0) || 1;
  paint(byId("heat-s"), rows, columns, (at) =>
    Number.isFinite(numbers.s[at]) ? colour(0.5 + numbers.s[at] / reach / 2) : masked,
  );
  byId("heat-s").setAttribute("aria-label", `Scores from ${written(-reach)} to ${written(reach)}`);
  showScale(byId("scale-s"), written(-reach), "scores", written(reach));
}

function showMask(numbers, rows, columns) {
  const on = rgb("--full"),
    off = rgb("--masked");
  const counting = numbers.s.reduce((n, x) => n + (x !== -Infinity), 0);
  paint(byId("heat-mask"), rows, columns, (at) => (numbers.s[at] === -Infinity ? off : on));
  byId("heat-mask").setAttribute("aria-label", `Mask: ${counting} of ${rows * columns} keys count`);
  byId("scale-mask").textContent = `${counting} of ${rows * columns} count`;
}

function showWeights(numbers, rows, columns) {
  const colour = ramp("weights"),
    alarm = rgb("--alarm");
  if (view.subtracts) {
    paint(byId("heat-p"), rows, columns, (at) => colour(weightOf(numbers.p[at])));
    byId("heat-p").setAttribute("aria-label", "Weights p, from 0 to 1");
    showScale(byId("scale-p"), "0", "weights", "1");
    return;
  }
  const most = Math.log(LARGEST[view.type]);
  paint(byId("heat-p"), rows, columns, (at) => (overflows(numbers.s[at]) ? alarm : colour(numbers.s[at] / most)));
  const count = numbers.s.reduce((n, s) => n + overflows(s), 0);
  byId("heat-p").setAttribute("aria-label", `exp(s): ${count} of ${rows * columns} overflow ${view.type}`);
  byId("scale-p").replaceChildren(element("i", { class: "swatch alarm" }), ` ${count} overflow`);
}

// What lies under the pointer.
function readCell(event) {
  const numbers = numbersOf(view.at);
  if (numbers === null) return;
  const { i, j } = stepNow(),
    queries = queriesOf(i),
    keys = keysOf(j),
    box = event.currentTarget.getBoundingClientRect();
  const row = Math.min(Math.floor(((event.clientY - box.top) / box.height) * queries.count), queries.count - 1);
  const column = Math.min(Math.floor(((event.clientX - box.left) / box.width) * keys.count), keys.count - 1);
  if (row < 0 || column < 0) return;
  const at = row * keys.count + column,
    s = numbers.s[at];
  const bare = overflows(s) ? `exp(s) = ∞ in ${view.type}` : `exp(s) = ${written(Math.exp(s))}`;
  byId("cell").textContent =
    `query ${queries.first + row}, key ${keys.first + column}: s = ${written(s)}, ` +
    (view.subtracts ? `p = ${written(weightOf(numbers.p[at]))}` : bare);
  if (event.type === "click") choose(row);
}

function showOverflow() {
  const numbers = numbersOf(view.at),
    at = lastWithNumbers(),
    text = byId("overflow");
  text.classList.toggle("alarmed", false);
  byId("find-overflow").hidden = view.subtracts || firstOverflow() < 0;
  if (view.subtracts) {
    text.textContent =
      "Every exponent is s − row_max, at most 0: no weight is larger than 1, whatever the scores. " +
      "Turn it off to see what happens without.";
    return;
  }
  const cells = numbers === null ? 0 : numbers.s.reduce((n, s) => n + overflows(s), 0);
  const sums = at < 0 ? [] : numbersOf(at).bare[view.type];
  const lost = sums.reduce((n, x) => n + !Number.isFinite(x), 0);
  text.classList.toggle("alarmed", lost > 0);
  text.textContent =
    `Without it ${cells} of this tile's exponentials are beyond ${written(LARGEST[view.type])}, ` +
    `the largest number of ${view.type}. ` +
    (lost > 0
      ? `So far ${lost} of ${sums.length} rows have a sum of ∞: their output would be ∞ / ∞ = NaN.`
      : firstOverflow() < 0
        ? "Here none ever does: the scores are small. A larger --magnitude makes them large."
        : "So far all row sums of this query tile fit.");
}

const isLost = (at) => numbersOf(at)?.bare[view.type].some((x) => x === Infinity) ?? false;
const firstOverflow = () => steps().findIndex((_, at) => isLost(at));
