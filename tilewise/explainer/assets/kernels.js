// The kernels themselves: two sources side by side, and where a GPU has their buffers.

// -- sources --------------------------------------------------------------------------------------------------------
function buildSources() {
  const names = Object.keys(view.data.sources).filter((name) => view.data.sources[name].length > 0);
  fillChoice("left", names, "numpy");
  fillChoice("right", names, "cuda/tiled");
  showSources();
}

function showSources() {
  const sides = ["left", "right"].map((side) => ({
    name: byId(side).value,
    parts: view.data.sources[byId(side).value],
  }));
  const labelled = view.data.labels.map(([step, meaning]) =>
    element(
      "div",
      { class: "step" },
      element("h3", {}, step === "loop" ? meaning : `${step} ${meaning}`),
      ...sides.map((side) => sourceCell(side, step)),
    ),
  );
  const rest = element(
    "details",
    { class: "step" },
    element("summary", {}, "The rest of the files"),
    ...sides.map((side) => sourceCell(side, "")),
  );
  byId("aligned").replaceChildren(...labelled, rest);
}

function sourceCell(side, step) {
  const parts = side.parts.filter((part) => part.step === step);
  const cell = element("div", { class: "source", role: "group", "aria-label": side.name });
  cell.append(
    ...parts.flatMap((part) => [
      element(
        "p",
        { class: "where" },
        `${part.file}:${part.line}${part.text.includes("\n") ? "" : ", together with the next step"}`,
      ),
      element("pre", { tabindex: 0 }, withoutIndent(part.text)),
    ]),
  );
  if (parts.length === 0) cell.append(element("p", { class: "where" }, `${side.name} has no such step of its own`));
  return cell;
}

function withoutIndent(text) {
  const lines = text.split("\n"),
    kept = lines.filter((line) => line.trim() && !line.startsWith("#"));
  const indent = Math.min(...kept.map((line) => line.length - line.trimStart().length));
  return Number.isFinite(indent)
    ? lines.map((line) => (/^\s/.test(line) ? line.slice(indent) : line)).join("\n")
    : text;
}

// -- places in a GPU's memory ---------------------------------------------------------------------------------------
function buildPlaces() {
  fillChoice(
    "placement",
    view.data.places.map((x) => x.kernel),
    "cuda/tiled",
  );
}

function showPlaces() {
  const chosen = view.data.places[Math.max(byId("placement").selectedIndex, 0)],
    { i, j, kind } = stepNow();
  const numbered = { query: `[${i}]`, key: `[${j}]`, "next key": "[next]", "": "" };
  const skipped = kind === "EMPTY";
  byId("places-note").textContent = skipped
    ? "This tile is skipped: the block keeps what it has, and loads nothing."
    : `A block with a tile of ${chosen.tile.q} × ${chosen.tile.k}, ${chosen.dtype}, ` +
      `takes ${inBytes(chosen.shared)} of shared memory.`;
  const rows = chosen.buffers.map((buffer) =>
    tableRow(
      `${buffer.name}${numbered[buffer.of]}`,
      ...(skipped ? whileSkipped(buffer) : buffer.places).map(placeCell),
      element("td", {}, sizeOf(buffer)),
    ),
  );
  byId("buffers").replaceChildren(
    headerRow("buffer", "1", "2", "3", "4", "5", "6", "7", "bytes"),
    element("tbody", {}, ...rows),
  );
}

function placeCell(path) {
  const text = path.map((name) => (name === "registers" ? "regs" : name)).join(" → ");
  return element("td", { class: `place ${path.length ? path[path.length - 1] : "none"}` }, text || "·");
}

// What belongs to the query tile stays where it is between two key tiles; the rest is not there.
function whileSkipped(buffer) {
  const between = buffer.of === "query" ? buffer.places[3] : [];
  return buffer.places.map(() => between);
}

function sizeOf(buffer) {
  const parts = [];
  if (buffer.shared) parts.push(`${buffer.count > 1 ? `${buffer.count} × ` : ""}${inBytes(buffer.shared)} shared`);
  if (buffer.shares) parts.push(`in ${buffer.shares}`);
  if (buffer.registers) parts.push(`${inBytes(buffer.registers)} regs`);
  return parts.join(", ");
}
