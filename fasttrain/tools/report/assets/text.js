// Elements, and numbers as people read them. Data becomes text, never markup.

function el(name, options = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (key === "style") Object.assign(node.style, value);
    else if (key === "class") node.className = value;
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null && child !== ""));
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "colour") node.style.stroke = value;
    else if (value != null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

const format = {
  // 1234567 -> 1.23M
  short(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    for (const [unit, letter] of UNITS) if (size >= unit * 0.9995) return `${digits(value / unit, 3)}${letter}`;
    return digits(value, 3);
  },
  whole: (value) => (value == null ? "–" : Math.round(value).toLocaleString("en-US")),
  loss: (value) => (value == null ? "–" : Math.abs(value) >= 1e5 ? value.toExponential(2) : value.toFixed(4)),
  // four digits that matter, small and large ones with an exponent
  figure(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return digits(value, 4);
  },
  percent: (value) => (value == null ? "–" : `${digits(value * 100, 3)}%`),
  bytes(value) {
    if (value == null) return "–";
    for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (value >= unit) return `${digits(value / unit, 3)} ${name}`;
    }
    return value ? `${value} B` : "0";
  },
  seconds(value) {
    if (!value) return value === 0 ? "0" : "–";
    if (value < 1e-3) return `${digits(value * 1e6, 3)} µs`;
    if (value < 1) return `${digits(value * 1e3, 3)} ms`;
    return value < 120 ? `${digits(value, 3)} s` : format.duration(value);
  },
  duration(seconds) {
    if (seconds == null) return "–";
    const s = Math.round(seconds);
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
    if (s < 2 * 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  },
  moment(time) {
    if (!time) return "–";
    const at = new Date(time * 1000);
    const two = (number) => String(number).padStart(2, "0");
    return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
  },
};

// At most `count` digits that matter, without zeros that say nothing.
function digits(value, count) {
  if (value === 0) return "0";
  const whole = Math.floor(Math.log10(Math.abs(value))) + 1;
  return String(Number(value.toFixed(Math.min(Math.max(count - whole, 0), 12))));
}
