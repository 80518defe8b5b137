// The warp-specialised kernel: what each role did, round by round of the simulator's turns.

const LANE = 24,
  LABELS = 112,
  PER_ROUND = 9;
const SPANS = {
  works: "at work, waits for its own products included",
  waits: "waits",
  copy: "a copy under way",
  product: "a product under way",
};

function buildTimeline() {
  const { spans, roles, missing, cut } = view.data.timeline,
    svg = byId("timeline");
  byId("roles-note").textContent =
    missing ??
    "The trace of one block of forward_sm90.cu on the CUDA simulator, which runs the real source but has no clock: " +
      "time is counted in rounds, in which every thread that can go on has a turn." +
      (cut ? " The first part of it." : "");
  byId("roles-legend").replaceChildren(
    ...(missing
      ? []
      : Object.entries(SPANS).map(([kind, meaning]) =>
          element("li", {}, element("i", { class: `swatch ${kind}` }), meaning),
        )),
  );
  svg.replaceChildren();
  svg.toggleAttribute("hidden", missing !== undefined);
  if (missing !== undefined) return;
  const rounds = Math.max(...spans.map(([, , , end]) => end)) + 1,
    height = roles.length * LANE + 24;
  svg.setAttribute("viewBox", `0 0 ${LABELS + rounds * PER_ROUND} ${height}`);
  svg.setAttribute("width", LABELS + rounds * PER_ROUND);
  svg.setAttribute("height", height);
  for (const [lane, role] of roles.entries()) {
    svg.append(
      element("line", {
        class: "tick",
        x1: LABELS,
        x2: LABELS + rounds * PER_ROUND,
        y1: (lane + 1) * LANE - 2,
        y2: (lane + 1) * LANE - 2,
      }),
    );
    svg.append(element("text", { x: 0, y: lane * LANE + 15 }, role.replace("products of consumer", "↳ products")));
  }
  for (const span of spans) svg.append(spanBox(span, roles));
  for (let round = 0; round < rounds; round += 20)
    svg.append(element("text", { x: LABELS + round * PER_ROUND, y: height - 6 }, `${round}`));
}

function spanBox([role, kind, start, end, label, step], roles) {
  const x = LABELS + start * PER_ROUND,
    width = Math.max((end - start) * PER_ROUND, 3),
    y = roles.indexOf(role) * LANE + 3;
  const box = element(
    "rect",
    { class: `span ${kind}`, x, y, width, height: LANE - 8, rx: 2 },
    element("title", {}, `${role}: ${label}, rounds ${start} to ${end}`),
  );
  const short =
    kind === "product" ? step : label.replace("waits for ", "").replace("copies a tile for ", "").replace("_full", "");
  const fits = kind !== "works" && short.length * 6 < width;
  return fits ? element("g", {}, box, element("text", { x: x + 3, y: y + 12, class: "in-span" }, short)) : box;
}
