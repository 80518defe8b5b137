// Bytes so far, by the tiles and by the naive algorithm, as running charts.

const MARGIN = { left: 62, right: 10, top: 10, bottom: 20 };

// lines: [{ class, values, held }], one value a step; those up to now are drawn strong.
function chart(svg, height, most, lines) {
  const width = Math.max(svg.parentElement.clientWidth - 2, 200),
    count = steps().length;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const x = (at) => MARGIN.left + ((width - MARGIN.left - MARGIN.right) * (at + 1)) / count;
  const y = (value) => height - MARGIN.bottom - ((height - MARGIN.bottom - MARGIN.top) * value) / most;
  // A sum grows within a step; what is in use is so from its beginning to its end.
  const corners = (line, to) =>
    line.values.slice(0, to + 1).flatMap((value, at) =>
      line.held
        ? [
            [x(at - 1), y(value)],
            [x(at), y(value)],
          ]
        : [[x(at), y(value)]],
    );
  const points = (line, to) =>
    [[x(-1), y(0)], ...corners(line, to)].map((p) => p.map((n) => n.toFixed(1)).join(",")).join(" ");
  const ticks = [0, most / 2, most].flatMap((value) => [
    element("line", { class: "tick", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
    element("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, inBytes(Math.round(value))),
  ]);
  const drawn = lines.flatMap((line) => [
    element("polyline", { class: `to-come ${line.class}`, points: points(line, count) }),
    element("polyline", { class: line.class, points: points(line, view.at) }),
  ]);
  const cursor = element("line", {
    class: "cursor",
    x1: x(view.at),
    x2: x(view.at),
    y1: MARGIN.top,
    y2: height - MARGIN.bottom,
  });
  const label = element("text", { x: width - MARGIN.right, y: height - 5, "text-anchor": "end" }, "steps →");
  svg.replaceChildren(...ticks, ...drawn, cursor, label);
}

const total = ([read, write]) => read + write;

function showMemory() {
  const { plan } = view.data,
    now = stepNow(),
    last = steps()[steps().length - 1];
  const alone = call().heads === 1;
  chart(byId("traffic"), 190, total(last.naive), [
    { class: "naive", values: steps().map((step) => total(step.naive)) },
    { class: "tiled", values: steps().map((step) => total(step.tiled)) },
  ]);
  const line = (name, kind, [read, write], all) =>
    tableRow(
      element("span", {}, element("i", { class: `swatch ${kind}` }), name),
      ...[read, write, read + write, all].map((n) => element("td", { "data-value": n }, inBytes(n))),
    );
  byId("bytes").replaceChildren(
    headerRow("", "read", "written", "so far", alone ? "the plan's total" : "this head's total"),
    element(
      "tbody",
      {},
      line("tile by tile", "tiled", now.tiled, alone ? plan.tiled : total(last.tiled)),
      line("naive", "naive", now.naive, alone ? plan.naive : total(last.naive)),
    ),
  );
  const saved = total(now.naive) / Math.max(total(now.tiled), 1);
  byId("memory-note").textContent =
    `Naive attention stores n × n scores and reads them again, then the same with weights: ` +
    `${saved.toFixed(1)} times the bytes so far, in ${call().dtype}.`;
  chart(byId("chip"), 190, Math.max(plan.onChip, 1), [
    { class: "tiled", held: true, values: steps().map((step) => step.onChip) },
  ]);
  byId("chip-note").textContent =
    `${inBytes(now.onChip)} on chip are in use; a whole tile's work takes ${inBytes(plan.onChip)}, ` +
    `however long the sequence. The full matrix would take ${inBytes(plan.matrix)}.`;
}
