// Ramps of colours, and tables of numbers painted with them.

const COLOUR_STOPS = {
  weights: {
    light: ["#f4f6fb", "#b7c9f2", "#5b7fdb", "#2a3f9e", "#101a4d"],
    dark: ["#12161f", "#24386f", "#3f6fd1", "#7fb4f5", "#eef6ff"],
  },
  scores: {
    light: ["#1f5fbf", "#9cc0ea", "#f5f5f2", "#f0b48a", "#b5430f"],
    dark: ["#6aa8f5", "#2c5688", "#171b24", "#8a4a22", "#f59a5c"],
  },
};

function parsed(hex) {
  const number = parseInt(hex.trim().slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}
const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = (name) => parsed(styled(name));

// A function from 0 .. 1 to a colour.
function ramp(name) {
  const stops = COLOUR_STOPS[name][isDark() ? "dark" : "light"].map(parsed);
  return (x) => {
    const place = Math.min(Math.max(x, 0), 1) * (stops.length - 1);
    const below = Math.min(Math.floor(place), stops.length - 2);
    return stops[below].map((from, i) => from + (stops[below + 1][i] - from) * (place - below));
  };
}

// One pixel a number; the style sheet makes pixels large.
function paint(canvas, rows, columns, colourAt) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let at = 0; at < rows * columns; at++) {
    const [r, g, b] = colourAt(at);
    image.data.set([r, g, b, 255], at * 4);
  }
  context.putImageData(image, 0, 0);
}

function showScale(host, from, name, to) {
  const stops = COLOUR_STOPS[name][isDark() ? "dark" : "light"];
  const bar = element("span", { class: "bar", style: `background: linear-gradient(to right, ${stops.join(", ")})` });
  host.replaceChildren(from, bar, to);
}
