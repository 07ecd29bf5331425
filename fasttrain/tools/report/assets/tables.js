// All that is not a curve: what the runs are, what happened, what they write, where their checkpoints are, their settings.

const section = (title, ...children) => el("section", {}, el("h2", {}, title), ...children);

function table(columns, rows, name = "") {
  const cells = (row) => columns.map(({ title, right, whole, cell }) =>
    el("td", { class: [right && "right", whole && "whole"].filter(Boolean).join(" "), "data-label": title }, ...[cell(row)].flat()));
  const heads = columns.map(({ title, right }) => el("th", { class: right ? "right" : "", scope: "col" }, title));
  return el("div", { class: "card" }, el("table", { class: "rows", id: name }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row))))));
}

const swatch = (run) => el("i", { class: "swatch", style: { background: run.colour } });
const runColumn = { title: "Run", cell: ({ run }) => el("div", { class: "run" }, swatch(run), run.name) };

// A long table begins with its first rows.
function folded(columns, rows, name, most) {
  const shown = el("div", {}, table(columns, rows.slice(0, most), name));
  const all = el("button", { class: "all", type: "button", on: { click: () => shown.replaceChildren(table(columns, rows, name)) } }, `Show all ${rows.length}`);
  if (rows.length > most) shown.append(all);
  return shown;
}
const stateOf = (run) => el("span", { class: `state ${run.state}` }, run.state);

// "no news": a run that is killed cannot say so in its page.
function silence(run) {
  const quiet = Date.now() / 1000 - run.written;
  return run.state === "running" && quiet > 600 ? `no news for ${format.duration(quiet)}` : "";
}

function metadataOf(run) {
  const { step, planned, parameters, hardware, world_size, figures, left } = run;
  return [
    `${format.whole(step)}${planned ? ` of ${format.whole(planned)}` : ""} steps`,
    parameters ? `${format.short(parameters)} parameters` : "",
    hardware ? String(hardware) : "",
    world_size ? `${world_size} rank${world_size > 1 ? "s" : ""}` : "",
    `${format.duration(figures.seconds)}${left ? `, about ${format.duration(left)} left` : ""}`,
    `since ${format.moment(run.began)}`,
    ...Object.entries(run.versions).map(([name, version]) => `${name} ${version}`),
  ].filter(Boolean).flatMap((fact) => [el("span", {}, fact), " "]);
}

function head() {
  const theme = el("button", { type: "button", id: "theme", title: "light or dark", on: { click: toggleTheme } }, "Dark");
  const brand = el("div", { class: "brand" }, el("span", {}, el("b", {}, "fasttrain"), " report"), theme);
  if (!isAlone) return [brand, el("div", { class: "title" }, el("h1", {}, `${runs.length} runs compared`)), comparison()];
  const [run] = runs, { figures } = run;
  const quiet = silence(run);
  return [
    brand,
    el("div", { class: "title" }, el("h1", {}, run.name), stateOf(run), quiet ? el("span", { class: "wrong" }, quiet) : ""),
    el("p", { class: "metadata" }, ...metadataOf(run)),
    run.reason ? el("p", { class: "reason" }, run.reason) : "",
    run.planned && run.state !== "finished" ? el("div", { class: "progress", title: "steps done" }, el("div", { style: { width: `${Math.min(100, (run.step / run.planned) * 100)}%` } })) : "",
    el("dl", { class: "tiles" },
      tile("Loss", format.loss(figures.loss), "last step"),
      tile("Best validation", format.loss(figures.validation), figures.validation_step ? `at step ${format.whole(figures.validation_step)}` : "none yet"),
      tile("Tokens", format.short(figures.tokens), run.planned ? `${Math.round((run.step / run.planned) * 100)}% of the plan` : ""),
      tile("Tokens/s", format.short(figures.tokens_per_second), "median"),
      tile("MFU", format.percent(figures.mfu), "median"),
      tile("Memory", format.bytes(figures.memory), "peak, rank 0"),
      tile("Events", format.whole(figures.events), figures.rollbacks ? `${figures.rollbacks} rollback${figures.rollbacks > 1 ? "s" : ""}` : "warnings and worse")),
  ];
}

const tile = (name, value, note) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)));

function comparison() {
  const best = (name, least) => {
    const found = runs.map((run) => run.figures[name]).filter((value) => value != null);
    return found.length ? Math[least ? "min" : "max"](...found) : null;
  };
  const figure = (title, name, shown, best) => ({ title, right: true, cell: (run) => {
    const value = run.figures[name];
    return value != null && value === best ? el("b", {}, shown(value)) : shown(value);
  } });
  const columns = [
    { title: "Run", cell: (run) => el("div", { class: "run" }, swatch(run), el("b", {}, run.name)) },
    { title: "State", cell: (run) => [stateOf(run), silence(run) ? ` ${silence(run)}` : ""] },
    { title: "Steps", right: true, cell: (run) => `${format.whole(run.step)}${run.planned ? ` / ${format.whole(run.planned)}` : ""}` },
    { title: "Parameters", right: true, cell: (run) => format.short(run.parameters) },
    figure("Last loss", "loss", format.loss, best("loss", true)),
    figure("Best validation", "validation", format.loss, best("validation", true)),
    figure("Tokens", "tokens", format.short),
    figure("Time", "seconds", format.duration),
    figure("Tokens/s", "tokens_per_second", format.short, best("tokens_per_second")),
    figure("MFU", "mfu", format.percent, best("mfu")),
    figure("Events", "events", format.whole),
  ];
  const shown = table(columns, runs, "figures");
  shown.style.marginTop = "16px";
  return shown;
}

function eventTable() {
  const events = runs.flatMap((run) => run.events.map((event) => ({ ...event, run })));
  if (!events.length) return null;
  events.sort((a, b) => b.time - a.time);
  const columns = [
    ...(isAlone ? [] : [runColumn]),
    { title: "Step", right: true, cell: (event) => el("button", { class: "go", type: "button", title: "look at it on the curves", on: { click: () => lookAt(event) } }, format.whole(event.step)) },
    { title: "When", cell: (event) => el("span", { class: "nobreak soft" }, format.moment(event.time)) },
    { title: "Kind", cell: (event) => kindOf(event) },
    { title: "What happened", whole: true, cell: (event) => [event.text, event.action ? el("div", {}, `→ ${event.action}`) : "", details(event)] },
  ];
  const left = runs.reduce((sum, run) => sum + run.older_events, 0);
  const shown = folded(columns, events, "events", 25);
  return section("Events", shown, left ? el("p", { class: "below" }, `${left} older ones are in events.jsonl only.`) : "");
}

function details(event) {
  const evidence = Object.entries(event.evidence);
  if (!evidence.length && !event.documents.length) return "";
  const more = event.more_documents;
  return el("details", {}, el("summary", {}, [evidence.length && "evidence", event.documents.length && `${event.documents.length + more} documents`].filter(Boolean).join(", ")),
    evidence.length ? el("dl", {}, ...evidence.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])) : "",
    event.documents.length ? el("ul", {}, ...event.documents.map((name) => el("li", {}, name)), more ? el("li", {}, `and ${more} more`) : "") : "");
}

function lookAt(event) {
  const x = event.x[view.axis], [first, last] = xDomain(), half = (last - first) * 0.05;
  change({ zoom: [Math.max(first, x - half), Math.min(last, x + half)], marks: true });
  charts[0].root.scrollIntoView({ behavior: "smooth", block: "center" });
}

function samples() {
  const texts = runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run })));
  if (!texts.length) return null;
  texts.sort((a, b) => b.time - a.time);
  const shown = ({ run, step, x, text }) => el("div", { class: "sample" },
    el("div", { class: "soft" }, isAlone ? "" : swatchLabel(run), `step ${format.whole(step)} · ${format.short(x.tokens)} tokens`), el("pre", {}, text));
  const first = isAlone ? 2 : runs.length, card = el("div", { class: "card" }, ...texts.slice(0, first).map(shown));
  if (texts.length > first) card.append(el("details", { class: "fold" }, el("summary", {}, `${texts.length - first} earlier`), ...texts.slice(first).map(shown)));
  return section("What the model writes", card);
}

const swatchLabel = (run) => el("span", {}, el("i", { style: { display: "inline-block", width: "10px", height: "10px", borderRadius: "50%", marginRight: "7px", background: run.colour } }), `${run.name} · `);

function evaluations() {
  const found = runs.flatMap((run) => run.evaluations.map((line) => ({ ...line, run })));
  if (!found.length) return null;
  found.sort((a, b) => b.step - a.step || b.time - a.time);
  const begin = [...(isAlone ? [] : [runColumn]), { title: "Step", right: true, cell: (line) => format.whole(line.step) }];
  const end = { title: "When", cell: (line) => el("span", { class: "nobreak soft" }, format.moment(line.time)) };
  const sets = [
    ...begin,
    { title: "Set", cell: (line) => [line.set, line.suspicion ? el("div", { class: "wrong" }, line.suspicion) : ""] },
    { title: "Loss", right: true, cell: (line) => format.loss(line.loss) },
    { title: "Perplexity", right: true, cell: (line) => format.figure(line.perplexity) },
    { title: "Bits per byte", right: true, cell: (line) => format.figure(line.bits_per_byte) },
    { title: "Accuracy", right: true, cell: (line) => format.percent(line.accuracy) },
    { title: "Tokens", right: true, cell: (line) => format.short(line.tokens) },
    end,
  ];
  const tasks = [
    ...begin,
    { title: "Task", cell: (line) => line.task },
    { title: "Metric", cell: (line) => `${line.metric}${line.filter === "none" ? "" : ` (${line.filter})`}` },
    { title: "Value", right: true, cell: (line) => `${format.figure(line.value)}${line.stderr == null ? "" : ` ± ${format.figure(line.stderr)}`}` },
    { title: "Questions", right: true, cell: (line) => format.whole(line.samples) },
    { title: "Examples", right: true, cell: (line) => format.whole(line.fewshot) },
    end,
  ];
  const tables = [[sets, "set", "sets"], [tasks, "task", "tasks"]].map(([columns, key, name]) => [columns, found.filter((line) => line[key]), name]);
  return section("Evaluations", ...tables.filter(([, rows]) => rows.length).map(([columns, rows, name]) => folded(columns, rows, name, 25)));
}

const CHECKPOINT_STATES = {
  committed: ["good", "verified when it was written"],
  quarantined: ["soft", "quarantined: the run rolled back to before it"],
  corrupt: ["wrong", "corrupt"],
};

function checkpoints() {
  const found = runs.flatMap((run) => run.checkpoints.map((saved) => ({ ...saved, run })));
  const columns = [
    ...(isAlone ? [] : [runColumn]),
    { title: "Step", right: true, cell: (saved) => format.whole(saved.step) },
    { title: "Validation", right: true, cell: (saved) => (saved.loss == null ? "–" : format.loss(saved.loss)) },
    { title: "Size", right: true, cell: (saved) => format.bytes(saved.bytes) },
    { title: "Saved", cell: (saved) => el("span", { class: "nobreak soft" }, format.moment(saved.time)) },
    { title: "State", cell: (saved) => {
      const [colour, text] = CHECKPOINT_STATES[saved.state];
      return el("span", {}, el("span", { class: colour }, saved.trouble ? `${text}: ${saved.trouble}` : text), ...saved.marks.map((mark) => el("span", { class: "tag" }, mark)));
    } },
    { title: "Directory", cell: (saved) => el("span", { class: "mono" }, saved.path) },
  ];
  found.sort((a, b) => b.step - a.step || b.time - a.time);
  const body = found.length ? folded(columns, found, "checkpoints", innerWidth < 760 ? 3 : 12) : el("p", { class: "soft" }, "None yet.");
  return section("Checkpoints", body);
}

function settings() {
  const full = (run) => el("div", { class: "settings" }, ...run.settings.map(({ name, settings }) => el("section", {}, el("h3", {}, name),
    el("dl", {}, ...settings.flatMap(({ key, value, changed }) => [el("dt", { class: changed ? "changed" : "" }, key), el("dd", { class: changed ? "changed" : "" }, value || "–")])))));
  const note = el("p", { class: "below" }, "Bold: not the default.");
  if (isAlone) return runs[0].settings.length ? section("Settings", el("div", { class: "card" }, full(runs[0])), note) : null;
  const columns = [{ title: "Setting", cell: (row) => el("span", { class: "mono" }, row.key) }, ...runs.map((run, i) => ({ title: run.name, cell: (row) => row.values[i] || "–" }))];
  const differ = data.differences.length ? table(columns, data.differences, "differences") : el("p", { class: "soft" }, "All settings are the same.");
  const folds = runs.map((run) => el("details", { class: "fold" }, el("summary", {}, `All settings of ${run.name}`), full(run)));
  return section("Settings that differ", differ, el("div", { class: "card", style: { marginTop: "12px" } }, ...folds));
}
