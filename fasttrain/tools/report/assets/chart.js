// A chart: curves over steps, tokens or hours, with the events of the runs. Hover reads values, a drag zooms all charts.
//
// spec: id, title, unit, format (of a value), lines() -> what to draw; and if need be wide, height, stacked, zero (the
// scale begins there), log (whether it starts logarithmic), peaks (rare ones are cut off), fall (the first steps do not
// count for the scale), labels (kinds of events), keys (of colours).
// line: run, label, colour, places (x by axis), y; and if need be low, high, first (step of each bucket), smooth, dots, ghost.

const MARGIN = { left: 54, right: 14, top: 12, bottom: 24 };
const GLYPHS = { error: "M0 0h9l-4.5 8z", warning: "M4.5 0l4.5 4.5-4.5 4.5-4.5-4.5z", action: "M4.5 0a4.5 4.5 0 1 0 .01 0z", info: "M3 0h3v9h-3z" };
const SEVERITY = Object.keys(GLYPHS);
const NEAR = 7; // pixels around an event that count as on it

const charts = [];

class Chart {
  constructor(parent, spec) {
    this.spec = spec;
    this.logButton = this.scaleButton("log", "logarithmic scale", () => this.isLog, () => this.toggleLog());
    this.peakButton = this.scaleButton("all", spec.peaks ? "rare peaks too" : "the first steps too", () => view.whole.has(spec.id), () => {
      view.whole.has(spec.id) ? view.whole.delete(spec.id) : view.whole.add(spec.id);
      change({});
    });
    this.keys = el("div", { class: "keys" });
    this.svg = svg("svg", { role: "img", "aria-label": `${spec.title}: curves`, tabindex: 0 });
    const buttons = [spec.log == null ? null : this.logButton, spec.peaks || spec.fall ? this.peakButton : null];
    const head = el("header", {}, el("h3", {}, spec.title), el("span", { class: "unit" }, spec.unit ?? ""), ...buttons);
    this.root = el("section", { class: `chart${spec.wide ? " wide" : ""}`, id: `chart-${spec.id}` }, head, this.keys, this.svg);
    parent.append(this.root);
    this.listen();
    charts.push(this);
  }

  get isLog() { return this.spec.log != null && (view.log ? view.log.has(this.spec.id) : this.spec.log); }

  toggleLog() {
    const log = new Set(charts.filter((chart) => chart.isLog).map((chart) => chart.spec.id));
    this.isLog ? log.delete(this.spec.id) : log.add(this.spec.id);
    change({ log });
  }

  scaleButton(text, title, isOn, act) {
    const button = el("button", { class: "scale", type: "button", title, on: { click: act } }, text);
    button.update = () => button.setAttribute("aria-pressed", isOn());
    return button;
  }

  draw() {
    const width = this.root.clientWidth - 20;
    if (width <= 0) return; // in a closed fold
    const height = this.spec.height ?? (width < 520 ? 190 : 215);
    this.logButton.update();
    this.peakButton.update();
    this.keys.replaceChildren(...(this.spec.keys ?? []).map(({ label, colour, shape }) =>
      el("span", {}, el("i", { class: shape ?? "", style: shape === "area" ? { background: colour } : { borderColor: colour } }), label)));
    this.lines = this.spec.lines().filter((line) => isVisible(line.run)).map((line) => this.prepared(line));
    this.size = { left: MARGIN.left, top: MARGIN.top + (this.spec.labels && view.marks ? 12 : 0), right: width - MARGIN.right, bottom: height - MARGIN.bottom };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.scale();
    this.svg.replaceChildren(this.axes(), this.inside(this.curves()), this.marks());
    this.cross = svg("line", { class: "cross", y1: this.size.top, y2: this.size.bottom, visibility: "hidden" });
    this.selection = svg("rect", { class: "select", y: this.size.top, height: this.size.bottom - this.size.top, visibility: "hidden" });
    this.svg.append(this.selection, this.cross);
  }

  prepared(line) {
    const x = line.places[view.axis];
    return { ...line, x, shown: line.smooth ? smoothed(x, line.y, view.smooth, view.zoom ?? xDomain()) : line.y };
  }

  scale() {
    const { left, right, top, bottom } = this.size;
    this.domain = view.zoom ?? xDomain();
    this.toX = linear(...this.domain, left, right);
    let [low, high] = this.spec.stacked ? [0, extent([this.within(this.total(), this.lines[0]?.x ?? [])])[1]]
      : extent(this.lines.flatMap((line) => [line.y, line.low ?? [], line.high ?? []].map((list) => this.within(list, line.x))));
    if (!view.whole.has(this.spec.id)) {
      if (this.spec.peaks) high = Math.min(high, this.usual() * 1.25);
      if (this.spec.fall && !view.zoom) high = this.afterFall(high);
    }
    this.isEmpty = !(low <= high);
    if (this.isEmpty) [low, high] = [0, 1];
    if (this.isLog) {
      const least = extent(this.lines.map((line) => this.within(line.low ?? line.y, line.x).filter((value) => value > 0)))[0];
      low = least < Infinity ? least : high / 10;
      if (!(high > 0)) [low, high] = [0.1, 1];
      if (high / low < 1.05) [low, high] = [low / 1.05, high * 1.05];
      const room = (high / low) ** 0.04;
      this.toY = logarithmic(low / room, high * room, bottom, top);
    } else {
      if (this.spec.zero) low = Math.min(low, 0);
      if (high - low < 1e-12 * Math.max(Math.abs(high), 1e-30)) [low, high] = [low - Math.abs(low) * 0.05 - 1e-9, high + Math.abs(high) * 0.05 + 1e-9];
      const room = (high - low) * 0.05;
      this.toY = linear(this.spec.zero && low === 0 ? 0 : low - room, high + room, bottom, top);
    }
  }

  // A list's values on the part of the axis that is shown.
  within(list, x) {
    const [from, to] = this.domain;
    return list.filter((value, i) => value != null && x[i] >= from && x[i] <= to);
  }

  total() {
    const length = this.lines[0]?.x.length ?? 0;
    return Array.from({ length }, (_, i) => this.lines.reduce((sum, line) => sum + (line.shown[i] ?? 0), 0));
  }

  // The value that all but one in fifty do not exceed.
  usual() {
    const lists = this.spec.stacked ? [this.within(this.total(), this.lines[0]?.x ?? [])] : this.lines.map((line) => this.within(line.y, line.x));
    const values = lists.flat().sort((a, b) => a - b);
    return values.length ? values[Math.floor((values.length - 1) * 0.98)] : Infinity;
  }

  // The highest value after the first hundredth of all steps, with a little of the fall.
  afterFall(high) {
    const begins = this.domain[0] + (this.domain[1] - this.domain[0]) * 0.01;
    const later = extent(this.lines.flatMap((line) => [line.y, line.high ?? []].map((list) => this.within(list, line.x).length ? list.filter((_, i) => line.x[i] >= begins) : [])))[1];
    return later > -Infinity ? Math.min(high, later) : high;
  }

  axes() {
    const { left, right, top, bottom } = this.size;
    const group = svg("g");
    for (const tick of this.toY.ticks(bottom - top < 150 ? 4 : 5)) {
      const y = at(this.toY(tick));
      if (y < top - 1 || y > bottom + 1) continue;
      group.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      group.append(svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, this.spec.tick?.(tick) ?? format.short(tick)));
    }
    group.append(svg("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }));
    const ticks = this.toX.ticks((right - left) / 90);
    for (const tick of ticks) {
      const x = at(this.toX(tick));
      if (x > right + 1) continue;
      const anchor = x > right - 14 ? "end" : "middle";
      group.append(svg("text", { x, y: bottom + 17, "text-anchor": anchor }, axisTick(tick, ticks)));
    }
    if (this.isEmpty) group.append(svg("text", { class: "empty", x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "nothing here"));
    return group;
  }

  // A nested svg cuts off what lies outside of the plot.
  inside(children) {
    const { left, right, top, bottom } = this.size;
    const width = right - left + 8, height = bottom - top + 4;
    return svg("svg", { x: left - 4, y: top - 2, width, height, viewBox: `${left - 4} ${top - 2} ${width} ${height}` }, ...children);
  }

  curves() {
    return this.spec.stacked ? this.areas() : this.lines.flatMap((line) => this.curve(line));
  }

  curve(line) {
    const style = { fill: "none", colour: line.colour, "stroke-linejoin": "round", "stroke-linecap": "round" };
    if (line.ghost) return [svg("path", { ...style, "data-ghost": "", d: linePath(line.x, line.y, this.toX, this.toY), "stroke-width": 1, "stroke-dasharray": "2 3", opacity: 0.75 })];
    const drawn = [];
    if (line.low) {
      const band = svg("path", { d: bandPath(line.x, line.low, line.high, this.toX, this.toY, true), opacity: 0.2 });
      band.style.fill = line.colour;
      drawn.push(band);
    }
    if (line.shown !== line.y) drawn.push(svg("path", { ...style, d: linePath(line.x, line.y, this.toX, this.toY), "stroke-width": 1, opacity: 0.28 }));
    drawn.push(svg("path", { ...style, "data-line": line.label, d: linePath(line.x, line.shown, this.toX, this.toY), "stroke-width": line.dots ? 1.25 : line.thin ? 1 : 1.75 }));
    const dots = line.x.filter((x) => x >= this.domain[0] && x <= this.domain[1]).length;
    if (line.dots && dots * 11 < this.size.right - this.size.left) {
      for (let i = 0; i < line.x.length; i++) {
        if (line.y[i] == null) continue;
        const dot = svg("circle", { cx: at(this.toX(line.x[i])), cy: at(this.toY(line.y[i])), r: 3, "stroke-width": 1.5 });
        Object.assign(dot.style, { stroke: line.colour, fill: "var(--card)" });
        drawn.push(dot);
      }
    }
    return drawn;
  }

  areas() {
    let base = (this.lines[0]?.x ?? []).map(() => 0);
    return this.lines.map((line) => {
      const top = base.map((below, i) => below + (line.shown[i] ?? 0));
      const area = svg("path", { "data-line": line.label, d: bandPath(line.x, base, top, this.toX, this.toY), opacity: 0.9 });
      area.style.fill = line.colour;
      base = top;
      return area;
    });
  }

  // Events: a line, a shape for how serious they are, and on the largest chart their kinds where there is room.
  marks() {
    const { left, right, top, bottom } = this.size;
    const placed = eventsShown().map((event) => ({ event, x: this.toX(event.x[view.axis]) }));
    this.events = view.marks ? placed.filter(({ x }) => x >= left - 1 && x <= right + 1).sort((a, b) => a.x - b.x) : [];
    const group = svg("g");
    let end = -Infinity; // of the label before
    for (const { events, x } of on_all(this.events)) {
      const [first] = events.toSorted((a, b) => SEVERITY.indexOf(a.severity) - SEVERITY.indexOf(b.severity));
      const place = at(x), { severity } = first;
      const mark = svg("g", { class: `mark ${severity}`, "data-kind": first.kind }, svg("line", { x1: place, x2: place, y1: top, y2: bottom }));
      group.append(mark);
      if (severity === "info") continue;
      mark.append(svg("path", { d: GLYPHS[severity], transform: `translate(${place - 3.5} ${top - 8}) scale(.78)` }));
      const kinds = [...new Set(events.filter((event) => event.severity !== "info").map((event) => event.kind))].join(", ");
      const text = isAlone ? kinds : `${first.run.name}: ${kinds}`;
      const length = text.length * 6 + 10, flip = x + length > right;
      if (!this.spec.labels || (flip ? x - length : x) <= end) continue;
      mark.append(svg("text", { x: place + (flip ? -7 : 7), y: top - 1, "text-anchor": flip ? "end" : "start" }, text));
      end = flip ? x + 7 : x + length;
    }
    return group;
  }

  listen() {
    const place = (event) => (event.clientX - this.svg.getBoundingClientRect().left) * this.svg.viewBox.baseVal.width / this.svg.clientWidth;
    let from = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = place(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      const x = place(event);
      if (from != null && Math.abs(x - from) > 5) {
        hideTip();
        this.select(from, x);
      } else this.hover(x, event.clientX, event.clientY);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const x = place(event), began = from;
      from = null;
      if (began != null && Math.abs(x - began) > 5) this.zoom(began, x);
      else this.hover(x, event.clientX, event.clientY);
    });
    this.svg.addEventListener("pointercancel", () => { from = null; this.selection.setAttribute("visibility", "hidden"); hideTip(); });
    this.svg.addEventListener("pointerleave", (event) => { if (from == null && event.pointerType === "mouse") hideTip(); });
    this.svg.addEventListener("dblclick", () => change({ zoom: null }));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", hideTip);
  }

  // Arrow keys move from point to point.
  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") return view.zoom ? change({ zoom: null }) : hideTip();
    const x = this.lines[0]?.x;
    if (!move || !x) return;
    event.preventDefault();
    this.cursor = Math.min(Math.max((this.cursor ?? (move > 0 ? -1 : x.length)) + move, 0), x.length - 1);
    const box = this.svg.getBoundingClientRect(), place = this.toX(x[this.cursor]);
    this.hover(place, box.left + place, box.top + 60);
  }

  select(a, b) {
    const { left, right } = this.size;
    const [from, to] = [Math.min(a, b), Math.max(a, b)].map((x) => Math.min(Math.max(x, left), right));
    for (const [key, value] of Object.entries({ x: from, width: to - from, visibility: "visible" })) this.selection.setAttribute(key, value);
  }

  zoom(a, b) {
    const { left, right } = this.size;
    const places = [a, b].map((x) => this.toX.invert(Math.min(Math.max(x, left), right))).sort((p, q) => p - q);
    change({ zoom: places[1] > places[0] ? places : null });
  }

  hover(x, clientX, clientY) {
    const { left, right } = this.size;
    const near = this.events.filter((event) => Math.abs(event.x - x) <= NEAR).map(({ event }) => event);
    if (x < left - NEAR || x > right + NEAR) return hideTip();
    const wanted = this.toX.invert(Math.min(Math.max(x, left), right));
    for (const chart of charts) chart.showCross(wanted);
    const box = this.svg.getBoundingClientRect();
    showTip(clientX, clientY, this.readings(wanted, this.toY.invert(clientY - box.top)), near);
  }

  showCross(value) {
    if (!this.cross?.isConnected) return;
    const x = this.toX(value), inside = value != null && x >= this.size.left - 1 && x <= this.size.right + 1;
    this.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    if (inside) for (const end of ["x1", "x2"]) this.cross.setAttribute(end, at(x));
  }

  // What the curves say at a place: {where, rows}.
  readings(wanted, height) {
    let where = "", rows = [], best = Infinity;
    for (const line of this.lines) {
      const { x } = line;
      if (line.ghost || !x.length || wanted < x[0] - (x[1] - x[0] || 1) || (wanted > x[x.length - 1] && !this.isLastNear(x, wanted))) continue;
      const i = nearest(x, wanted);
      if (line.dots && Math.abs(this.toX(x[i]) - this.toX(wanted)) > 12) continue;
      if (Math.abs(x[i] - wanted) < best) [best, where] = [Math.abs(x[i] - wanted), whereIs(line, i)];
      const range = line.low && line.low[i] !== line.high[i] && line.low[i] != null ? `${this.spec.format(line.low[i])} – ${this.spec.format(line.high[i])}` : "";
      const mean = line.shown !== line.y && line.shown[i] != null ? `smoothed ${this.spec.format(line.shown[i])}` : "";
      rows.push({ label: line.label, colour: line.colour, value: line.y[i] == null ? "not finite" : this.spec.format(line.y[i]), more: [range, mean].filter(Boolean).join(", "), distance: Math.abs((line.y[i] ?? Infinity) - height) });
    }
    if (rows.length > 12) rows = rows.toSorted((a, b) => a.distance - b.distance).slice(0, 8);
    if (this.spec.stacked && rows.length) {
      const sum = this.total()[nearest(this.lines[0].x, wanted)];
      rows = [...rows.toReversed(), { label: "together", colour: "transparent", value: this.spec.format(sum), more: "" }];
    }
    return { where, rows };
  }

  isLastNear(x, wanted) { return this.toX(wanted) - this.toX(x[x.length - 1]) < 12; }
}

// Events that would lie upon each other.
function on_all(placed) {
  const groups = [];
  for (const { event, x } of placed) {
    const last = groups.at(-1);
    if (last && x - last.x < 4) last.events.push(event);
    else groups.push({ events: [event], x });
  }
  return groups;
}

function whereIs(line, i) {
  const { step, tokens, hours } = line.places, first = line.first?.[i];
  const steps = first != null && first !== step[i] ? `steps ${format.whole(first)} – ${format.whole(step[i])}` : `step ${format.whole(step[i])}`;
  return `${steps} · ${format.short(tokens[i])} tokens · ${format.duration(hours[i] * 3600)}`;
}

// With as many digits as it takes to tell the ticks apart.
function axisTick(tick, ticks) {
  const apart = ticks[1] - ticks[0] || tick || 1, most = ticks[ticks.length - 1];
  if (view.axis === "hours") return most < 0.1 ? `${digits(tick * 60, 3)} min` : `${Number(tick.toFixed(Math.max(0, Math.ceil(-Math.log10(apart)))))} h`;
  const [unit, letter] = UNITS.find(([unit]) => most >= unit) ?? [1, ""];
  const places = Math.max(0, Math.ceil(-Math.log10(apart / unit) - 1e-9));
  if (places > 2 || !tick) return format.whole(tick);
  return `${Number((tick / unit).toFixed(places))}${letter}`;
}

// One little window for all charts.
function showTip(x, y, { where, rows }, events) {
  const tip = document.getElementById("tip");
  const parts = [el("div", { class: "where" }, where)];
  for (const row of rows) {
    parts.push(el("div", { class: "row" }, el("i", { style: { background: row.colour } }), el("span", {}, row.label, row.more ? el("small", {}, ` ${row.more}`) : ""), el("b", {}, row.value)));
  }
  for (const event of events.slice(0, 4)) parts.push(eventTip(event));
  if (events.length > 4) parts.push(el("div", { class: "event soft" }, `and ${events.length - 4} more; zoom in`));
  tip.replaceChildren(...parts);
  tip.hidden = !where && !events.length;
  const gap = 14, { offsetWidth: width, offsetHeight: height } = tip;
  const left = x + gap + width > innerWidth - 8 ? x - gap - width : x + gap;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(y + gap, innerHeight - height - 8))}px`;
}

function eventTip(event) {
  const evidence = Object.entries(event.evidence).slice(0, 6).map(([key, value]) => `${key}: ${value}`).join(" · ");
  const documents = event.documents.slice(0, 3).map((name) => name.split("/").slice(-2).join("/")).join(", ");
  const more = event.documents.length + event.more_documents - 3;
  return el("div", { class: "event" },
    kindOf(event, ` at step ${format.whole(event.step)}${isAlone ? "" : ` of ${event.run.name}`}`),
    el("p", {}, event.text),
    event.action ? el("p", {}, `→ ${event.action}`) : "",
    evidence ? el("p", { class: "soft" }, evidence) : "",
    documents ? el("p", { class: "soft" }, `documents: ${documents}${more > 0 ? ` and ${more} more` : ""}`) : "");
}

function kindOf(event, more = "") {
  const shape = svg("svg", { viewBox: "0 0 9 9", "aria-hidden": "true" }, svg("path", { d: GLYPHS[event.severity], fill: "currentColor" }));
  return el("span", { class: `kind ${event.severity}` }, shape, `${event.kind}${more}`);
}

function hideTip() {
  document.getElementById("tip").hidden = true;
  for (const chart of charts) chart.showCross(null);
}
