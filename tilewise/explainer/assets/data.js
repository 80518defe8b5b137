// The recording, as numbers: what Python packed in base64, unpacked when it is first looked at.

const byId = (id) => document.getElementById(id);

function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}
const floatsOf = (text) => new Float32Array(bytesOf(text).buffer);

// All that the panels show is a function of this.
const view = { data: null, at: 0, row: 0, subtracts: true, type: "float16", system: "numpy" };

function take(data) {
  view.data = data;
  view.at = 0;
  view.row = 0;
  data.numbers = data.steps.map(() => null);
  data.values = floatsOf(data.v);
}

const call = () => view.data.call;
const steps = () => view.data.steps;
const stepNow = () => steps()[view.at];
const queriesOf = (i) => ({ first: i * call().tileQ, count: Math.min(call().tileQ, call().nQ - i * call().tileQ) });
const keysOf = (j) => ({ first: j * call().tileK, count: Math.min(call().tileK, call().nK - j * call().tileK) });

// The numbers of a step; null if it was skipped.
function numbersOf(at) {
  const packed = steps()[at].numbers;
  if (packed === null) return null;
  if (view.data.numbers[at] === null) {
    const made = { moved: bytesOf(packed.moved), p: new Uint16Array(bytesOf(packed.p).buffer), bare: {} };
    for (const name of ["s", "rescale", "rowMax", "rowSum", "acc"]) made[name] = floatsOf(packed[name]);
    for (const type of Object.keys(packed.bare)) made.bare[type] = floatsOf(packed.bare[type]);
    view.data.numbers[at] = made;
  }
  return view.data.numbers[at];
}
const weightOf = (p) => p / 65535;

// The last step up to now that the query tile at work had numbers of; -1 if it has none yet.
function lastWithNumbers() {
  const { i } = stepNow();
  for (let at = view.at; at >= 0 && steps()[at].i === i; at--) if (steps()[at].numbers !== null) return at;
  return -1;
}

// -- how numbers are written ----------------------------------------------------------------------------------------
function written(x) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = size !== 0 && (size < 5e-4 || size >= 1e5) ? x.toExponential(2) : x.toFixed(size < 1e4 ? 3 : 0);
  return text.replace("-", "−");
}

function inBytes(n) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (n < 1024 || unit === "MiB") return unit === "B" ? `${n} B` : `${n.toFixed(n < 100 ? 1 : 0)} ${unit}`;
    n /= 1024;
  }
  return "";
}

// -- building the page ----------------------------------------------------------------------------------------------
function element(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "polyline", "text", "title", "g", "path"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (value !== null && value !== false) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A cell that shows a number, and has all of it for whoever asks.
function numberCell(x, kind = null) {
  return element("td", { "data-value": Number.isFinite(x) ? x : String(x), class: kind }, written(x));
}

// What was chosen before stays chosen, if it is still there.
function fillChoice(id, names, first) {
  const kept = byId(id).value || first;
  byId(id).replaceChildren(...names.map((name) => element("option", { selected: name === kept ? "" : null }, name)));
}

function tableRow(header, ...cells) {
  return element("tr", {}, element("th", { scope: "row" }, header), ...cells);
}

function headerRow(...names) {
  return element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));
}
