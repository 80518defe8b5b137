// The running numbers of the query tile, and one of its rows beside a softmax that is computed plainly.

const COLUMNS = 4; // of acc that are shown

function showState() {
  const { i, kind } = stepNow(),
    at = lastWithNumbers(),
    bare = !view.subtracts;
  const fresh = at === view.at,
    shown = Math.min(bare ? COLUMNS - 1 : COLUMNS, call().dV);
  const names = [
    "query",
    "row_max",
    "rescale",
    "row_sum",
    ...(bare ? ["Σ exp(s)"] : []),
    ...Array.from({ length: shown }, (_, c) => `acc[${c}]`),
  ];
  const rows = [];
  for (let r = 0; r < queriesOf(i).count; r++) rows.push(stateRow(r, at, fresh, shown, bare));
  byId("rows").replaceChildren(headerRow(...names), element("tbody", {}, ...rows));
  const moved = fresh ? numbersOf(at).moved.reduce((n, x) => n + x, 0) : 0;
  byId("state-note").textContent =
    kind === "EMPTY"
      ? "A skipped tile changes nothing."
      : `${moved} of ${rows.length} rows found a larger maximum (▲): what they had summed is multiplied by rescale.`;
}

function stateRow(r, at, fresh, shown, bare) {
  const { first } = queriesOf(stepNow().i),
    dV = call().dV,
    numbers = at < 0 ? null : numbersOf(at);
  const moved = fresh && numbers.moved[r] === 1;
  const values =
    numbers === null ? [-Infinity, 1, 0] : [numbers.rowMax[r], fresh ? numbers.rescale[r] : 1, numbers.rowSum[r]];
  const cells = values.map((x) => numberCell(x));
  if (bare) {
    const sum = numbers === null ? 0 : numbers.bare[view.type][r];
    cells.push(numberCell(sum, Number.isFinite(sum) ? null : "alarm"));
  }
  for (let c = 0; c < shown; c++) cells.push(numberCell(numbers === null ? 0 : numbers.acc[r * dV + c]));
  const row = tableRow(`${first + r}${moved ? " ▲" : ""}`, ...cells);
  row.className = [moved ? "moved" : "", r === view.row ? "chosen" : ""].join(" ").trim();
  row.addEventListener("click", () => choose(r));
  return row;
}

// -- the plain softmax ----------------------------------------------------------------------------------------------
// Over the keys that were visited so far, in one go: the largest score, exponentials, their sum, the weighted values.
function plainSoftmax(row) {
  const { i } = stepNow(),
    { dV } = call(),
    scores = [];
  for (let at = view.at; at >= 0 && steps()[at].i === i; at--) {
    const numbers = numbersOf(at),
      keys = keysOf(steps()[at].j);
    if (numbers === null) continue;
    for (let c = 0; c < keys.count; c++) scores.push({ key: keys.first + c, s: numbers.s[row * keys.count + c] });
  }
  const largest = scores.reduce((most, x) => Math.max(most, x.s), -Infinity);
  const seen = scores.filter((x) => x.s !== -Infinity);
  const sum = seen.reduce((total, x) => total + Math.exp(x.s - largest), 0);
  const weights = seen.map((x) => ({ key: x.key, weight: Math.exp(x.s - largest) / sum }));
  const out = Array.from({ length: dV }, (_, c) =>
    weights.reduce((total, x) => total + x.weight * view.data.values[x.key * dV + c], 0),
  );
  return { largest, sum, weights, out };
}

function showSoftmax() {
  const { i } = stepNow(),
    { first, count } = queriesOf(i),
    at = lastWithNumbers(),
    { dV } = call();
  view.row = Math.min(view.row, count - 1);
  byId("row").max = count - 1;
  byId("row").value = view.row;
  byId("row-name").textContent = first + view.row;
  const plain = plainSoftmax(view.row),
    numbers = at < 0 ? null : numbersOf(at);
  const ours =
    numbers === null
      ? { largest: -Infinity, sum: 0 }
      : { largest: numbers.rowMax[view.row], sum: numbers.rowSum[view.row] };
  const out = (c) => (ours.sum === 0 ? 0 : numbers.acc[view.row * dV + c] / ours.sum);
  const compared = [
    ["row_max", ours.largest, plain.largest],
    ["row_sum", ours.sum, plain.sum],
  ];
  for (let c = 0; c < Math.min(COLUMNS, dV); c++) compared.push([`acc[${c}] / row_sum`, out(c), plain.out[c]]);
  byId("compare").replaceChildren(
    headerRow("", "tile by tile", "plain", "difference"),
    element(
      "tbody",
      {},
      ...compared.map(([name, a, b]) =>
        tableRow(
          name,
          numberCell(a),
          numberCell(b),
          element("td", {}, a === b ? "0" : Math.abs(a - b).toExponential(0)),
        ),
      ),
    ),
  );
  drawWeights(plain.weights);
}

function drawWeights(weights) {
  const canvas = byId("weights"),
    context = canvas.getContext("2d"),
    { nK } = call(),
    { j } = stepNow(),
    keys = keysOf(j);
  canvas.width = canvas.clientWidth * devicePixelRatio;
  canvas.height = canvas.clientHeight * devicePixelRatio;
  const step = canvas.width / nK,
    most = weights.reduce((top, x) => Math.max(top, x.weight), 0) || 1;
  context.fillStyle = styled("--shade");
  context.fillRect(keys.first * step, 0, keys.count * step, canvas.height);
  context.fillStyle = styled("--accent");
  for (const { key, weight } of weights) {
    const height = (weight / most) * (canvas.height - 2);
    context.fillRect(key * step, canvas.height - height, Math.max(step * 0.85, 1), height);
  }
  canvas.setAttribute("aria-label", `Weights of ${weights.length} keys so far; the largest is ${written(most)}`);
}
