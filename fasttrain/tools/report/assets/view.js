// What is looked at, and how. It is in the address after the #, so that a page which loads itself again looks the same.

const AXES = { step: "Steps", tokens: "Tokens", hours: "Hours" };

const view = {
  axis: "step",
  zoom: null, // [from, to] on the axis; null: all
  smooth: 0.6, // 0: not at all
  marks: true, // events on the curves
  hidden: new Set(), // names of runs
  log: null, // ids of charts with a logarithmic scale; null: as each chart has it
  whole: new Set(), // ids of charts that show their rare peaks too
};

const redraws = []; // to call when the view changes

function readView() {
  const said = new URLSearchParams(location.hash.slice(1));
  if (said.get("x") in AXES) view.axis = said.get("x");
  const zoom = (said.get("zoom") ?? "").split("~").map(Number);
  if (zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1]) view.zoom = zoom;
  if (said.has("smooth")) view.smooth = Math.min(Math.max(Number(said.get("smooth")) || 0, 0), 0.99);
  view.marks = said.get("marks") !== "0";
  view.hidden = new Set(said.getAll("hide"));
  view.log = said.has("log") ? new Set(said.getAll("log")) : null;
  view.whole = new Set(said.getAll("whole"));
}

function writeView() {
  const said = new URLSearchParams();
  if (view.axis !== "step") said.set("x", view.axis);
  if (view.zoom) said.set("zoom", view.zoom.map((place) => Number(place.toPrecision(9))).join("~"));
  if (view.smooth !== 0.6) said.set("smooth", view.smooth);
  if (!view.marks) said.set("marks", "0");
  for (const name of view.hidden) said.append("hide", name);
  if (view.log) for (const id of view.log.size ? view.log : ["none"]) said.append("log", id);
  for (const id of view.whole) said.append("whole", id);
  history.replaceState(null, "", `#${said}`);
}

function change(changes) {
  Object.assign(view, changes);
  writeView();
  for (const redraw of redraws) redraw();
}

const isVisible = (run) => !view.hidden.has(run.name);

// sessionStorage is not there for every page that opens from disk.
function remember(key, value) {
  try { sessionStorage.setItem(`fasttrain:${key}`, value); } catch { /* then it is forgotten */ }
}

function recall(key) {
  try { return sessionStorage.getItem(`fasttrain:${key}`); } catch { return null; }
}
