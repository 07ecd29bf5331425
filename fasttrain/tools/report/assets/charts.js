// Which charts there are, by what the runs have measured.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map((run, i) => ({ ...run, colour: `var(--c${i % 8})` }));
const isAlone = runs.length === 1;

const PARTS = ["data", "wait", "forward", "backward", "optimizer", "record"];
const BESIDE = ["validation", "checkpoint"]; // phases that are not the step's

const xDomain = () => {
  const shown = runs.filter(isVisible);
  const ends = (shown.length ? shown : runs).map((run) => run.x[view.axis]);
  const first = Math.min(...ends.map((x) => x[0])), last = Math.max(...ends.map((x) => x[x.length - 1]));
  const from = first <= last * 0.1 ? 0 : first;
  return [from, last > from ? last : from + 1];
};

// The beginning of a run is where its curves begin: no mark for it.
const eventsShown = () => runs.filter(isVisible).flatMap((run) => run.events.filter((event) => event.kind !== "start").map((event) => ({ ...event, run })));

function lineOf(run, name, more = {}) {
  const { mean, low, high } = run.series[name];
  return { run, label: run.name, colour: run.colour, places: run.x, first: run.first, y: mean, low, high, ...more };
}

function linesOf(name, more = {}) {
  return runs.filter((run) => name in run.series).map((run) => lineOf(run, name, { ...more, label: isAlone ? more.label ?? name : run.name }));
}

const setsOf = (run) => Object.keys(run.validations);
const setColour = (run, set) => (isAlone ? `var(--c${1 + (setsOf(run).indexOf(set) % 7)})` : run.colour);

function lossLines() {
  const train = linesOf("loss", { smooth: true, label: "training" });
  const ghosts = runs.flatMap((run) => run.taken_back.map(({ x, loss }) => ({ run, label: "taken back", colour: isAlone ? "var(--bad)" : run.colour, places: x, y: loss, ghost: true })));
  const sets = runs.flatMap((run) => setsOf(run).map((set) => {
    const { x, loss } = run.validations[set];
    return { run, label: isAlone ? set : `${run.name}: ${set}`, colour: setColour(run, set), places: x, y: loss, dots: true };
  }));
  return [...ghosts, ...train, ...sets];
}

function lossKeys() {
  const ghosts = runs.some((run) => run.taken_back.length);
  if (!isAlone) return [{ label: "training", colour: "var(--soft)" }, { label: "validation", colour: "var(--soft)", shape: "dot" }];
  const keys = [{ label: "training", colour: runs[0].colour }];
  for (const set of setsOf(runs[0])) keys.push({ label: `validation: ${set}`, colour: setColour(runs[0], set), shape: "dot" });
  if (ghosts) keys.push({ label: "taken back", colour: "var(--bad)", shape: "dashed" });
  return keys;
}

// Deep blocks are yellow, those near the embedding violet: a scale that colour-blind people see as well.
function depthColour(share) {
  const stops = [[91, 60, 140], [59, 103, 158], [33, 145, 140], [94, 180, 92], [205, 170, 40]];
  const place = share * (stops.length - 1), i = Math.min(Math.floor(place), stops.length - 2), part = place - i;
  return `rgb(${stops[i].map((from, c) => Math.round(from + (stops[i + 1][c] - from) * part)).join(" ")})`;
}

function blockChart(run) {
  const names = Object.keys(run.series).filter((name) => name.startsWith("block_norm/")).sort();
  if (!names.length) return null;
  const colour = (i) => depthColour(names.length > 1 ? i / (names.length - 1) : 0);
  const short = (i) => `block ${Number(names[i].slice(11)) || names[i].slice(11).replace(/^0+(?=.)/, "")}`;
  return {
    id: `blocks-${runs.indexOf(run)}`, title: `Gradient norm by block${isAlone ? "" : ` · ${run.name}`}`, format: format.figure, log: true,
    keys: [0, names.length - 1].map((i) => ({ label: short(i), colour: colour(i) })),
    lines: () => names.map((name, i) => lineOf(run, name, { label: short(i), colour: colour(i), smooth: true, thin: names.length > 12 })),
  };
}

function timeChart(run) {
  const found = Object.keys(run.series).filter((name) => name.startsWith("time/")).map((name) => name.slice(5));
  const parts = [...PARTS.filter((part) => found.includes(part)), ...found.filter((part) => ![...PARTS, ...BESIDE].includes(part))];
  if (!parts.length) return null;
  const colour = (part) => (PARTS.includes(part) ? `var(--${part})` : `var(--c${3 + (parts.indexOf(part) % 5)})`);
  return {
    id: `time-${runs.indexOf(run)}`, title: `Step time${isAlone ? "" : ` · ${run.name}`}`, unit: "rank 0, by part", format: format.seconds, tick: format.seconds, stacked: true, zero: true, peaks: true,
    keys: parts.map((part) => ({ label: part, colour: colour(part), shape: "area" })),
    lines: () => parts.map((part) => lineOf(run, `time/${part}`, { label: part, colour: colour(part), smooth: true })),
  };
}

function chartSpecs() {
  const known = (name, title, more) => (runs.some((run) => name in run.series) ? { id: name.replace(/\W/g, "-"), title, format: format.figure, ...more, lines: () => linesOf(name, { smooth: more.smooth, label: title }) } : null);
  return [
    { id: "loss", title: "Loss", unit: "nats per token", wide: true, height: innerWidth < 760 ? 260 : 340, format: format.loss, log: false, fall: true, labels: true, keys: lossKeys(), lines: lossLines },
    known("lr", "Learning rate", { log: false, zero: true, tick: format.figure }),
    known("grad_norm", "Gradient norm", { unit: "before clipping", smooth: true, log: true }),
    ...runs.map(blockChart),
    known("tokens_per_second", "Tokens per second", { smooth: true, zero: true, format: format.short }),
    known("mfu", "MFU", { unit: "model FLOPs utilisation", smooth: true, zero: true, format: format.percent, tick: format.percent }),
    ...runs.map(timeChart),
    known("memory", "Memory", { unit: "peak so far, rank 0", zero: true, format: format.bytes, tick: format.bytes }),
    known("unsaved_steps", "Steps not saved yet", { zero: true }),
    known("checkpoint_age", "Age of the last checkpoint", { zero: true, format: format.seconds, tick: format.seconds }),
  ].filter(Boolean);
}

// Whatever else the runs have measured.
function otherSpecs() {
  const shown = ["loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory", "unsaved_steps", "checkpoint_age"];
  const names = new Set(runs.flatMap((run) => Object.keys(run.series)).filter((name) => !shown.includes(name)));
  const isPart = (name) => name.startsWith("block_norm/") || (name.startsWith("time/") && !BESIDE.includes(name.slice(5)));
  return [...names].filter((name) => !isPart(name)).map((name) => {
    const seconds = name.startsWith("time/") || name.endsWith("_seconds");
    const unit = name.endsWith("memory") ? format.bytes : seconds ? format.seconds : name === "gpu/utilisation" ? format.percent : format.figure;
    return { id: `other-${name.replace(/\W/g, "-")}`, title: name, format: unit, tick: unit === format.figure ? undefined : unit, log: false, zero: true, peaks: seconds, lines: () => linesOf(name, { smooth: name !== "epoch", label: name }) };
  });
}
