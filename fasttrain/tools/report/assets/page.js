// Puts the page together.

const RELOAD = 30; // seconds between looks at a run that is under way

function controls() {
  const axis = el("div", { class: "segments", role: "group", "aria-label": "axis" }, ...Object.entries(AXES).map(([name, label]) =>
    el("button", { type: "button", "data-axis": name, on: { click: () => change({ axis: name, zoom: null }) } }, label)));
  const slider = el("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, on: { input: () => change({ smooth: Number(slider.value) }) } });
  const amount = el("output", { for: "smooth" });
  const marks = el("input", { type: "checkbox", id: "marks", on: { change: () => change({ marks: marks.checked }) } });
  const reset = el("button", { type: "button", id: "reset", on: { click: () => change({ zoom: null }) } }, "Reset zoom");
  const legend = isAlone ? "" : el("div", { class: "legend" }, ...runs.map((run) => el("button", { class: "chip", type: "button", "data-run": run.name, on: { click: () => toggleRun(run) } }, el("i", { style: { background: run.colour } }), el("span", {}, run.name))));
  const update = () => {
    for (const button of axis.children) button.setAttribute("aria-pressed", button.dataset.axis === view.axis);
    slider.value = view.smooth;
    amount.textContent = view.smooth ? view.smooth.toFixed(2) : "off";
    marks.checked = view.marks;
    reset.disabled = !view.zoom;
    if (legend) for (const chip of legend.children) chip.setAttribute("aria-pressed", !view.hidden.has(chip.dataset.run));
  };
  redraws.push(update);
  update();
  return el("div", {}, legend, axis, el("label", {}, "Smoothing", slider, amount), el("label", {}, marks, "Events"), reset);
}

function toggleRun(run) {
  const hidden = new Set(view.hidden);
  hidden.has(run.name) ? hidden.delete(run.name) : hidden.add(run.name);
  change({ hidden });
}

const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function toggleTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  remember("theme", document.documentElement.dataset.theme);
  nameTheme();
}

function nameTheme() { document.getElementById("theme").textContent = isDark() ? "Light" : "Dark"; }

function drawAll() {
  hideTip();
  for (const chart of charts) chart.draw();
}

// A run that is under way writes its page again and again. Nobody is interrupted: not while the pointer is on a curve.
function keepUpToDate() {
  if (!runs.some((run) => run.state === "running")) return;
  const look = () => {
    const busy = document.hidden || !document.getElementById("tip").hidden || String(getSelection());
    if (busy) return setTimeout(look, 2000);
    remember("scroll", scrollY);
    location.reload();
  };
  setTimeout(look, RELOAD * 1000);
}

function start() {
  const theme = recall("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  readView();
  document.getElementById("head").append(...head());
  document.getElementById("controls").append(controls());
  const main = document.getElementById("main");
  const grid = el("div", { class: "charts" });
  main.append(grid);
  for (const spec of chartSpecs()) new Chart(grid, spec);
  const others = otherSpecs();
  if (others.length) {
    const more = el("div", { class: "charts" });
    const fold = el("details", { class: "fold", id: "more", style: { marginTop: "12px" }, on: { toggle: () => { remember("more", fold.open ? "1" : ""); drawAll(); } } }, el("summary", {}, `${others.length} more figure${others.length > 1 ? "s" : ""}`), more);
    main.append(fold);
    for (const spec of others) new Chart(more, spec);
    fold.open = recall("more") === "1";
  }
  main.append(...[eventTable(), samples(), evaluations(), checkpoints(), settings()].filter(Boolean));
  document.getElementById("foot").append(`Written ${format.moment(data.written)} by fasttrain ${data.version}. ${runs.map((run) => run.path).join(", ")}`);
  redraws.push(drawAll);
  drawAll();
  nameTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  addEventListener("hashchange", () => { readView(); for (const redraw of redraws) redraw(); });
  const nav = document.getElementById("controls");
  addEventListener("scroll", () => { nav.classList.toggle("stuck", nav.getBoundingClientRect().top <= 0); hideTip(); }, { passive: true });
  const scroll = recall("scroll");
  if (scroll) { scrollTo(0, Number(scroll)); remember("scroll", ""); }
  keepUpToDate();
}

start();
