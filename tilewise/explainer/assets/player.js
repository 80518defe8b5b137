// Playing the recording: buttons, keys, the scrubber, and in live mode the controls that ask for another one.

let timer = null;

function showStatus() {
  const { i, j, kind } = stepNow(),
    last = steps().length - 1;
  byId("status").textContent =
    `Step ${view.at + 1} of ${last + 1}: query tile ${i}, key tile ${j}, ${kind}` +
    (kind === "EMPTY" ? ", skipped" : "");
  byId("status").className = kind.toLowerCase();
  byId("scrub").max = last;
  byId("scrub").value = view.at;
  byId("scrub").setAttribute("aria-valuetext", byId("status").textContent);
}

function showCall() {
  const { nQ, nK, d, tileQ, tileK, heads, head } = call();
  const { mask, score, seed, magnitude } = view.data.asked;
  const parts = [
    `${nQ} queries, ${nK} keys, d ${d}, tiles of ${tileQ} × ${tileK}`,
    `seed ${seed}, q times ${magnitude}`,
  ];
  if (heads > 1) parts.push(`head ${head} of ${heads}`);
  const codes = [mask || "none", score || "S"].map((text) => element("code", {}, text));
  byId("call").replaceChildren("mask ", codes[0], " · score ", codes[1], ` · ${parts.join(" · ")}`);
}

// What follows the step, the row and the switches.
function render() {
  for (const show of [
    showStatus,
    showGrid,
    showTile,
    showOverflow,
    showSoftmax,
    showState,
    showMemory,
    showPlaces,
    markRow,
  ])
    show();
}

function markRow() {
  byId("work").style.setProperty("--row", (view.row + 0.5) / queriesOf(stepNow().i).count);
}

// What is built once a recording.
function build() {
  for (const make of [showCall, buildGrid, buildVariant, buildSources, buildPlaces, buildTimeline]) make();
  render();
}

function go(at) {
  const before = stepNow().i;
  view.at = Math.min(Math.max(at, 0), steps().length - 1);
  render();
  if (stepNow().i !== before) byId("rows").parentElement.scrollTop = 0;
}

function choose(row) {
  view.row = Math.min(Math.max(row, 0), queriesOf(stepNow().i).count - 1);
  render();
}

// -- playing --------------------------------------------------------------------------------------------------------
function pause() {
  clearInterval(timer);
  timer = null;
  byId("play").classList.remove("playing");
  byId("status").ariaLive = "polite";
  byId("play").setAttribute("aria-label", "Play");
}

function play() {
  if (view.at === steps().length - 1) go(0);
  byId("play").classList.add("playing");
  byId("status").ariaLive = "off"; // who listens would hear nothing else
  byId("play").setAttribute("aria-label", "Pause");
  timer = setInterval(
    () => {
      go(view.at + 1);
      if (view.at === steps().length - 1) pause();
    },
    2000 / Number(byId("speed").value),
  );
}
const toggle = () => (timer === null ? play() : pause());

const KEYS = {
  " ": toggle,
  ArrowRight: () => go(view.at + 1),
  ArrowLeft: () => go(view.at - 1),
  Home: () => go(0),
  End: () => go(steps().length - 1),
  ArrowDown: () => choose(view.row + 1),
  ArrowUp: () => choose(view.row - 1),
};

function onKey(event) {
  const typing = event.target.closest("input, select, textarea, .scroll, pre, summary");
  const pressing = event.key === " " && event.target.closest("button, a");
  if (typing || pressing || event.ctrlKey || event.altKey || event.metaKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
}

// -- live controls --------------------------------------------------------------------------------------------------
async function ask(event) {
  event.preventDefault();
  pause();
  const query = new URLSearchParams(new FormData(byId("controls")));
  refuse("");
  byId("controls").setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(`/recording?${query}`);
    const told = await answer.json();
    if ("refused" in told) refuse(told.refused);
    else {
      history.replaceState(null, "", `/?${query}`);
      take(told);
      build();
    }
  } catch (error) {
    refuse(`The server does not answer (${error.message}). Is tilewise explain --serve still running?`);
  } finally {
    byId("controls").removeAttribute("aria-busy");
  }
}

// A refusal begins with the name of the field that it is about.
function refuse(text) {
  byId("refusal").textContent = text;
  for (const field of byId("controls").elements) {
    const meant = field.name !== "" && text.startsWith(`${field.name}:`);
    field.ariaInvalid = meant ? "true" : null;
    if (meant) field.focus();
  }
}

function fillControls() {
  const { asked } = view.data;
  for (const [name, value] of Object.entries(asked)) {
    const field = byId("controls").elements.namedItem(name);
    if (field !== null) field.value = value ?? "";
  }
}

// -- beginning ------------------------------------------------------------------------------------------------------
// What has its colours from scripts.
function repaint() {
  buildGrid();
  render();
}

function begin() {
  take(JSON.parse(byId("recording").textContent));
  const clicks = {
    first: () => go(0),
    back: () => go(view.at - 1),
    play: toggle,
    next: () => go(view.at + 1),
    last: () => go(steps().length - 1),
    theme: () => (switchTheme(), repaint()),
  };
  for (const [id, act] of Object.entries(clicks)) byId(id).addEventListener("click", act);
  byId("scrub").addEventListener("input", (event) => go(Number(event.target.value)));
  byId("row").addEventListener("input", (event) => choose(Number(event.target.value)));
  byId("speed").addEventListener("change", () => timer !== null && (pause(), play()));
  byId("running-max").addEventListener("change", (event) => {
    view.subtracts = event.target.checked;
    render();
  });
  byId("bare-type").addEventListener("change", (event) => {
    view.type = event.target.value;
    render();
  });
  byId("find-overflow").addEventListener("click", () => go(firstOverflow()));
  byId("placement").addEventListener("change", showPlaces);
  for (const side of ["left", "right"]) byId(side).addEventListener("change", showSources);
  byId("grid").addEventListener("click", (event) => {
    const at = tileAt(event);
    if (at >= 0) go(at);
  });
  for (const id of ["heat-s", "heat-mask", "heat-p"])
    for (const kind of ["pointermove", "click"]) byId(id).addEventListener(kind, readCell);
  document.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  addEventListener("resize", render);
  if (document.documentElement.dataset.mode === "live") {
    byId("controls").hidden = false;
    byId("controls").addEventListener("submit", ask);
    fillControls();
  }
  build();
}
begin();
