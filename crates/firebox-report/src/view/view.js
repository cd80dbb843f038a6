// Sizes are bytes. Positions on the time axis are steps: step i spans from i to i + 1.
// Whatever comes from `data` reaches the page as text only (append of strings, fillText).

// ---- Small helpers

const root = document.documentElement;
const $ = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const count = (n) => n.toLocaleString("en-US");
const several = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const percent = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)} %`;
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = Math.abs(n), unit = 0;
  while (value >= 1023.995 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${n < 0 ? "−" : ""}${unit ? value.toFixed(2) : value} ${units[unit]}`;
}

const change = (n) => (n > 0 ? "+" : "") + bytes(n);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function swatch(colour) {
  const node = el("i", { class: "swatch" });
  node.style.background = colour;
  return node;
}

// A series holds its first value and then differences.
function decode(series, length) {
  const values = new Float64Array(length);
  for (let i = 0, sum = 0; i < length; i++) values[i] = sum += (series && series[i]) || 0;
  return values;
}

const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

// The part [low, high] of 0..size that a chart shows.
class Range {
  constructor(size, least) {
    this.size = size;
    this.least = Math.min(size, least);
    this.reset();
  }
  reset() { this.low = 0; this.high = this.size; }
  set(low, high) {
    const span = clamp(high - low, this.least, this.size);
    this.low = clamp((low + high - span) / 2, 0, this.size - span);
    this.high = this.low + span;
  }
  zoom(at, factor) { this.set(at - (at - this.low) * factor, at + (this.high - at) * factor); }
  pan(by) { this.set(this.low + by, this.high + by); }
  get span() { return this.high - this.low; }
  get whole() { return this.span >= this.size; }
}

// ---- Colours: Okabe and Ito's seven, then five chosen to stay apart from them in simulated colour blindness

const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442",
  "#684848", "#a0e8a0", "#085888", "#70d8f8", "#904808"];
const GREY = "#b4b6b9";
const known = { category: new Map(), module: new Map() };

// A name keeps its colour from plan to plan, unless another name of this plan has it.
function paint(by, names) {
  const mine = new Map(), taken = new Set();
  const give = (name, colour) => { mine.set(name, colour); taken.add(colour); };
  for (const name of names) {
    const colour = name === "other" ? GREY : known[by].get(name);
    if (colour && (colour === GREY || !taken.has(colour))) give(name, colour);
  }
  for (const name of names) {
    if (mine.has(name)) continue;
    give(name, PALETTE.find((colour) => !taken.has(colour)) || GREY);
    if (!known[by].has(name)) known[by].set(name, mine.get(name));
  }
  return mine;
}

function hashed(text) {
  let hash = 7;
  for (let i = 0; i < text.length; i++) hash = (hash * 31 + text.charCodeAt(i)) >>> 0;
  return PALETTE[hash % PALETTE.length];
}

function isLight(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 130;
}

const ink = {};
function readInks() {
  const style = getComputedStyle(root);
  for (const name of ["panel", "ink", "muted", "line", "faint", "accent", "warn", "spare"]) {
    ink[name] = style.getPropertyValue(`--${name}`).trim();
  }
  ink.font = getComputedStyle(document.body).fontFamily;
}

// ---- A plan, made ready to be shown

function prepare(plan) {
  const steps = Math.max((plan.reserved || []).length, (plan.live || []).length);
  const tensors = plan.tensors || [], categories = plan.categories || [], modules = plan.modules || [];
  const colours = {
    category: paint("category", [...new Set([...categories, ...tensors.map((t) => ({ name: t.category }))]
      .map((c) => c.name))]),
    module: paint("module", modules.map((m) => m.name)),
  };
  const stack = (parts, by) => parts.map(({ name, bytes: series }) =>
    ({ name, key: `${by} ${name}`, colour: colours[by].get(name), values: decode(series, steps) }));
  const view = {
    plan, steps, tensors, colours,
    reserved: decode(plan.reserved, steps),
    live: decode(plan.live, steps),
    stacks: { category: stack(categories, "category"), module: stack(modules, "module") },
    peakAt: clamp(plan.peak_at || 0, 0, Math.max(0, steps - 1)),
    marks: plan.marks || [],
    range: new Range(steps, 8),
    pages: (plan.pages || []).map(preparePage),
    byName: new Map(tensors.map((t) => [t.name, t])),
    cache: {},
  };
  view.reservedTop = largest(view.reserved);
  view.liveTop = largest(view.live);
  return view;
}

// Fills the holes between a page's buffers with spans marked as lost.
function preparePage(page) {
  const spans = [];
  let end = 0, lost = 0;
  const gap = (to) => {
    if (to <= end) return;
    spans.push({ from: end, to, lost: true });
    lost += to - end;
  };
  for (const [offset, size, label] of [...page.buffers].sort((a, b) => a[0] - b[0])) {
    gap(offset);
    spans.push({ from: offset, to: offset + size, label });
    end = Math.max(end, offset + size);
  }
  gap(page.bytes);
  const range = new Range(page.bytes, 4096);
  return { name: page.name, bytes: page.bytes, buffers: page.buffers.length, spans, lost, range };
}

const state = { views: [], view: null, by: "category", hidden: new Set(), cursor: null, pointerY: null, selection: null,
  pinned: null, sort: "bytes", ascending: false, words: [], shown: [], allPages: false, printing: false };

const parts = () => state.view.stacks[state.by];
const visible = (key) => !state.hidden.has(key);

// ---- Drawing: jobs are collected and done once a frame

const jobs = new Set();
let frame = 0;

function redraw(...wanted) {
  for (const job of wanted) jobs.add(job);
  if (!frame) frame = requestAnimationFrame(flush);
}

function flush() {
  cancelAnimationFrame(frame);
  frame = 0;
  const due = [...jobs];
  jobs.clear();
  for (const job of due) job(state.view);
}

function surface(canvas) {
  const w = canvas.clientWidth, h = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
  const width = Math.round(w * ratio), height = Math.round(h * ratio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, w, h);
  g.font = `12px ${ink.font}`;
  g.textBaseline = "middle";
  return { g, w, h };
}

function line(g, colour, width, dash, ...points) {
  g.beginPath();
  for (const [x, y] of points) g.lineTo(x, y);
  g.strokeStyle = colour;
  g.lineWidth = width;
  g.setLineDash(dash);
  g.stroke();
  g.setLineDash([]);
}

function hatch(g, x, y, w, h) {
  g.save();
  g.beginPath();
  g.rect(x, y, w, h);
  g.clip();
  g.fillStyle = ink.faint;
  g.fillRect(x, y, w, h);
  for (let at = x - h - (x % 7); at < x + w; at += 7) line(g, ink.spare, 1, [], [at, y + h], [at + h, y]);
  g.restore();
}

// Text with a rim in the colour of the panel, so that it can be read on any area.
function rimmed(g, text, x, y, colour) {
  g.strokeStyle = ink.panel;
  g.lineWidth = 4;
  g.lineJoin = "round";
  g.strokeText(text, x, y);
  g.fillStyle = colour;
  g.fillText(text, x, y);
}

// Where the timeline's axes lie; the overview below shares left and width.
function plot() {
  const canvas = $("timeline");
  const box = { left: 74, top: 22, width: Math.max(10, Math.floor(canvas.clientWidth) - 86),
    height: canvas.clientHeight - 46 };
  box.x = (range, step) => box.left + ((step - range.low) / range.span) * box.width;
  box.step = (range, x) => range.low + (clamp(x - box.left, 0, box.width) / box.width) * range.span;
  return box;
}

// One column a step or, if there are more steps than pixels, one a pixel. A pixel shows that of its steps which has the
// most bytes in use (or the peak, if it is there), and the most that was reserved.
function columns(view, range, width, slot) {
  const key = [range.low, range.high, width].join();
  if (view.cache[slot]?.key === key) return view.cache[slot];
  const list = { key, left: [], right: [], step: [], reserved: [], perPixel: range.span > width };
  const n = list.perPixel ? width : Math.ceil(range.high) - Math.floor(range.low);
  for (let i = 0; i < n; i++) {
    const low = list.perPixel ? range.low + (range.span * i) / width : Math.floor(range.low) + i;
    const high = list.perPixel ? range.low + (range.span * (i + 1)) / width : low + 1;
    const first = Math.min(view.steps - 1, Math.floor(low)), end = Math.min(view.steps, Math.ceil(high));
    let step = first, reserved = 0;
    for (let s = first; s < end; s++) {
      if (view.live[s] > view.live[step]) step = s;
      reserved = Math.max(reserved, view.reserved[s]);
    }
    if (view.peakAt >= first && view.peakAt < end) step = view.peakAt;
    list.left.push(clamp(((low - range.low) / range.span) * width, 0, width));
    list.right.push(clamp(((high - range.low) / range.span) * width, 0, width));
    list.step.push(step);
    list.reserved.push(reserved);
  }
  return (view.cache[slot] = list);
}

// Puts the top of a row of columns into the current path.
function stairs(g, cols, left, height, backwards) {
  const n = cols.step.length;
  for (let k = 0; k < n; k++) {
    const i = backwards ? n - 1 - k : k, y = height(i);
    g.lineTo(left + (backwards ? cols.right[i] : cols.left[i]), y);
    g.lineTo(left + (backwards ? cols.left[i] : cols.right[i]), y);
  }
}

// The highest value of the y axis: whatever is visible fits below it.
function ceiling(view) {
  const shown = parts().filter((part) => visible(part.key));
  let top = 1;
  for (let i = 0; i < view.steps; i++) {
    let sum = 0;
    for (const part of shown) sum += part.values[i];
    if (sum > top) top = sum;
  }
  if (visible("reserved")) top = Math.max(top, view.reservedTop);
  if (visible("tensors")) top = Math.max(top, view.liveTop);
  if (visible("budget")) top = Math.max(top, view.plan.budget);
  return top * 1.07;
}

function drawTimeline(view) {
  if (!view.steps) return;
  const { g, w } = surface($("timeline")), box = plot(), { range, plan } = view;
  const top = ceiling(view), bottom = box.top + box.height, right = box.left + box.width;
  const x = (step) => box.x(range, step), y = (value) => bottom - (value / top) * box.height;
  const cols = columns(view, range, box.width, "timeline"), inside = (step) => step >= range.low && step <= range.high;

  // Axes
  const rise = 2 ** Math.ceil(Math.log2(top / 6));
  g.textAlign = "right";
  for (let value = 0; value <= top; value += rise) {
    line(g, ink.line, 1, [], [box.left, Math.round(y(value)) + 0.5], [right, Math.round(y(value)) + 0.5]);
    g.fillStyle = ink.muted;
    g.fillText(bytes(value).replace(/\.0+ /, " "), box.left - 8, y(value));
  }
  const rough = (range.span * 90) / box.width, ten = 10 ** Math.floor(Math.log10(rough));
  const every = Math.max(1, [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= rough));
  g.textAlign = "center";
  for (let step = Math.ceil(range.low / every) * every; step < range.high; step += every) {
    line(g, ink.line, 1, [], [x(step), bottom], [x(step), bottom + 5]);
    g.fillText(count(step), clamp(x(step), box.left, right - 14), bottom + 15);
  }

  // Areas, from the bottom to the top
  g.save();
  g.beginPath();
  g.rect(box.left, 0, box.width, bottom);
  g.clip();
  const base = new Float64Array(cols.step.length), sums = new Float64Array(cols.step.length);
  for (const part of parts()) {
    if (!visible(part.key)) continue;
    cols.step.forEach((step, i) => { sums[i] = base[i] + part.values[step]; });
    g.beginPath();
    stairs(g, cols, box.left, (i) => y(sums[i]), false);
    stairs(g, cols, box.left, (i) => y(base[i]), true);
    g.fillStyle = part.colour;
    g.fill();
    base.set(sums);
  }

  // Lines
  const curve = (height, colour, width) => {
    g.beginPath();
    stairs(g, cols, box.left, height, false);
    g.strokeStyle = colour;
    g.lineWidth = width;
    g.lineJoin = "round";
    g.stroke();
  };
  if (visible("tensors")) curve((i) => y(view.live[cols.step[i]]), ink.ink, 1);
  if (visible("reserved")) curve((i) => y(cols.reserved[i]), ink.ink, 2);
  if (visible("budget")) line(g, ink.warn, 1.5, [7, 5], [box.left, y(plan.budget)], [right, y(plan.budget)]);
  g.restore();

  // Marks: where labels would overlap only the first is written
  let free = 0;
  g.textAlign = "left";
  for (const mark of view.marks) {
    if (!inside(mark.at)) continue;
    const at = Math.round(x(mark.at)) + 0.5, length = g.measureText(mark.name).width;
    line(g, ink.muted, 1, [2, 3], [at, box.top - 4], [at, bottom]);
    const from = Math.min(at - 1, w - length);
    if (from < free) continue;
    g.fillStyle = ink.muted;
    g.fillText(mark.name, from, 9);
    free = from + length + 8;
  }

  if (visible("budget")) {
    const text = `budget ${bytes(plan.budget)}`;
    rimmed(g, text, right - g.measureText(text).width - 6, y(plan.budget) + 11, ink.warn);
  }

  // The tensor chosen in the table: the span of its life
  if (state.pinned) {
    const from = Math.max(box.left, x(state.pinned.made ?? 0));
    const to = Math.min(right, x(state.pinned.freed ?? view.steps));
    if (to >= from) {
      if (from > box.left) line(g, ink.accent, 1.5, [], [from, bottom], [from, box.top]);
      if (to < right) line(g, ink.accent, 1.5, [], [to, bottom], [to, box.top]);
      g.fillStyle = ink.accent;
      g.fillRect(from, bottom - 4, to - from, 4);
      const length = g.measureText(state.pinned.name).width;
      rimmed(g, state.pinned.name, clamp(from + 6, box.left + 6, right - length - 6), bottom - 14, ink.accent);
    }
  }

  // The peak
  if (inside(view.peakAt + 0.5)) {
    const value = visible("reserved") ? view.reserved[view.peakAt] : view.live[view.peakAt];
    const at = x(view.peakAt + 0.5), text = `peak ${bytes(value)}`, length = g.measureText(text).width;
    line(g, ink.ink, 1, [], [at, bottom], [at, y(value)]);
    g.beginPath();
    g.arc(at, y(value), 4.5, 0, 2 * Math.PI);
    g.fillStyle = ink.panel;
    g.fill();
    g.strokeStyle = ink.ink;
    g.lineWidth = 2;
    g.stroke();
    rimmed(g, text, clamp(at - length / 2, box.left + 4, right - length), y(value) - 15, ink.ink);
  }

  drawSelection(g, $("timeline"), box.top, box.height);
  if (state.cursor !== null && inside(state.cursor + 0.5)) {
    const at = x(state.cursor + 0.5);
    line(g, ink.accent, 1, [], [at, box.top], [at, bottom]);
  }
  $("span").textContent = `steps ${count(Math.floor(range.low))} to ${count(Math.ceil(range.high) - 1)}`
    + ` of ${count(view.steps)}`;
  fillLegend(view);
}

function drawSelection(g, canvas, y, height) {
  const s = state.selection;
  if (!s || s.canvas !== canvas) return;
  g.globalAlpha = 0.25;
  g.fillStyle = ink.accent;
  g.fillRect(Math.min(s.from, s.to), y, Math.abs(s.to - s.from), height);
  g.globalAlpha = 1;
}

function drawOverview(view) {
  if (!view.steps) return;
  const { g, h } = surface($("overview")), box = plot(), all = new Range(view.steps, 1);
  const cols = columns(view, all, box.width, "overview");
  const top = Math.max(view.reservedTop, view.liveTop, 1) * 1.05, y = (value) => h - (value / top) * (h - 2);
  g.fillStyle = ink.faint;
  g.fillRect(box.left, 0, box.width, h);
  g.beginPath();
  stairs(g, cols, box.left, (i) => y(view.live[cols.step[i]]), false);
  stairs(g, cols, box.left, () => h, true);
  g.fillStyle = ink.spare;
  g.fill();
  g.beginPath();
  stairs(g, cols, box.left, (i) => y(cols.reserved[i]), false);
  g.strokeStyle = ink.muted;
  g.lineWidth = 1;
  g.stroke();
  const from = box.x(all, view.range.low), to = box.x(all, view.range.high);
  g.fillStyle = ink.panel;
  g.globalAlpha = 0.72;
  g.fillRect(box.left, 0, from - box.left, h);
  g.fillRect(to, 0, box.left + box.width - to, h);
  g.globalAlpha = 1;
  g.strokeStyle = ink.accent;
  g.lineWidth = view.range.whole ? 1 : 2;
  g.strokeRect(from, 1, Math.max(2, to - from), h - 2);
}

// ---- Legend

function buildLegend(view) {
  for (const button of document.querySelectorAll("#by button")) {
    button.setAttribute("aria-pressed", button.dataset.by === state.by);
  }
  const entries = [
    { key: "budget", icon: el("i", { class: "line dashed" }), value: () => view.plan.budget },
    { key: "reserved", icon: el("i", { class: "line" }), value: (step) => view.reserved[step] },
    { key: "tensors", icon: el("i", { class: "line thin" }), value: (step) => view.live[step] },
    ...[...parts()].reverse().map((part, i) => ({ key: part.key, name: part.name, icon: swatch(part.colour),
      style: i ? "" : "first-area", value: (step) => part.values[step] })),
  ];
  view.legend = entries.map(({ key, name = key, icon, style = "", value }) => {
    const number = el("span", { class: "number" });
    const button = el("button", { type: "button", class: style, title: name, "aria-pressed": visible(key) },
      icon, el("span", { class: "name" }, name), number);
    button.addEventListener("click", (event) => {
      const others = entries.map((entry) => entry.key).filter((other) => other !== key);
      const alone = visible(key) && !others.some(visible);
      if (event.shiftKey) {
        state.hidden.delete(key);
        for (const other of others) if (alone) state.hidden.delete(other); else state.hidden.add(other);
      } else if (!state.hidden.delete(key)) {
        state.hidden.add(key);
      }
      view.legend.forEach((entry) => entry.button.setAttribute("aria-pressed", visible(entry.key)));
      redraw(drawTimeline);
    });
    return { key, button, number, value };
  });
  $("legend").replaceChildren(...view.legend.map((entry) => entry.button));
  fillLegend(view);
}

// The numbers are those of the step under the pointer, else those of the peak.
function fillLegend(view) {
  const step = state.cursor ?? view.peakAt;
  $("legend-at").textContent = step === view.peakAt ? `at the peak, step ${count(step)}` : `at step ${count(step)}`;
  for (const { number, value } of view.legend) number.textContent = bytes(value(step));
}

// ---- Tooltip

function tipRow(left, right, colour, here) {
  return el("div", { class: `row${colour ? "" : " plain"}${here ? " here" : ""}` }, ...(colour ? [swatch(colour)] : []),
    el("span", { class: "name" }, left), el("span", { class: "number" }, right));
}

function showTip(x, y, ...content) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 18 + width > innerWidth - 6 ? x - 18 - width : x + 18;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${clamp(y + 14, 6, Math.max(6, innerHeight - height - 6))}px`;
}

function hideTip() {
  $("tip").hidden = true;
  state.pointerY = null;
  if (state.cursor === null) return;
  state.cursor = null;
  redraw(drawTimeline);
}

function stepTip(view, clientX, clientY) {
  const step = state.cursor, { plan } = view, before = (values) => values[step] - (step ? values[step - 1] : 0);
  const shown = parts().filter((part) => visible(part.key));
  let under = null;
  if (state.pointerY !== null) {
    const box = plot(), value = ((box.top + box.height - state.pointerY) / box.height) * ceiling(view);
    let sum = 0;
    under = value < 0 ? null : shown.find((part) => (sum += part.values[step]) >= value);
  }
  const big = shown.filter((part) => part.values[step] > 0).sort((a, b) => b.values[step] - a.values[step]);
  const top = big.filter((part, i) => i < 6 || big.length === 7 || part === under);
  const rest = big.filter((part) => !top.includes(part));
  const moved = view.stacks.module.reduce((best, part) =>
    Math.abs(before(part.values)) > Math.abs(best ? before(best.values) : 0) ? part : best, null);
  const content = [
    el("div", { class: "head" }, `Step ${count(step)}${step === view.peakAt ? ", the peak" : ""}`),
    tipRow("operation", (plan.names || [])[(plan.ops || [])[step]] ?? "unknown"),
    ...view.marks.filter((mark) => mark.at === step).map((mark) => tipRow("mark", mark.name)),
    ...(moved ? [tipRow(`changes ${moved.name}`, change(before(moved.values)))] : []),
    el("hr"),
    tipRow("reserved", bytes(view.reserved[step])),
    tipRow("tensors", bytes(view.live[step])),
    tipRow("tensors, change", change(before(view.live))),
  ];
  if (top.length) content.push(el("hr"));
  for (const part of top) content.push(tipRow(part.name, bytes(part.values[step]), part.colour, part === under));
  if (rest.length) {
    const sum = rest.reduce((total, part) => total + part.values[step], 0);
    content.push(tipRow(`${rest.length} smaller`, bytes(sum), "transparent"));
  }
  showTip(clientX, clientY, ...content);
}

// ---- Timeline: pointer and keys

const xIn = (canvas, event) => event.clientX - canvas.getBoundingClientRect().left;

// Calls begin(x) when the button goes down; it returns what to do on each move and at the end.
function onDrag(canvas, begin) {
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const drag = begin(xIn(canvas, event));
    const move = (e) => drag.move(xIn(canvas, e));
    const stop = (e) => {
      window.removeEventListener("pointermove", move);
      window.removeEventListener("pointerup", stop);
      window.removeEventListener("pointercancel", stop);
      drag.end?.(xIn(canvas, e), e.type === "pointerup");
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", stop);
    window.addEventListener("pointercancel", stop);
  });
}

// Dragging over a canvas marks a span; letting go zooms to it.
function zoomByDrag(canvas, rangeOf, unitsAt, ...draws) {
  onDrag(canvas, (from) => {
    state.selection = { canvas, from, to: from };
    return {
      move(to) {
        state.selection.to = to;
        hideTip();
        redraw(...draws);
      },
      end(to, done) {
        state.selection = null;
        if (done && Math.abs(to - from) > 4) {
          const ends = [unitsAt(from), unitsAt(to)];
          rangeOf().set(Math.min(...ends), Math.max(...ends));
        }
        redraw(...draws);
      },
    };
  });
  canvas.addEventListener("dblclick", () => {
    rangeOf().reset();
    redraw(...draws);
  });
}

function listenToTimeline() {
  const canvas = $("timeline"), range = () => state.view.range, both = [drawTimeline, drawOverview];
  const middle = () => (range().low + range().high) / 2;
  const zoom = (at, factor) => { range().zoom(at, factor); redraw(...both); };
  const reset = () => { range().reset(); redraw(...both); };
  $("zoom-in").addEventListener("click", () => zoom(middle(), 0.5));
  $("zoom-out").addEventListener("click", () => zoom(middle(), 2));
  $("zoom-reset").addEventListener("click", reset);
  zoomByDrag(canvas, range, (x) => plot().step(range(), x), ...both);

  canvas.addEventListener("wheel", (event) => {
    const { deltaX, deltaY } = event, sideways = event.shiftKey || Math.abs(deltaX) > Math.abs(deltaY);
    const by = (sideways ? deltaX || deltaY : deltaY) * (event.deltaMode === 1 ? 16 : 1); // lines or pixels
    if (range().whole && (sideways || by > 0)) return; // nothing to do here: the page may scroll
    event.preventDefault();
    if (sideways) {
      range().pan((by / plot().width) * range().span);
      redraw(...both);
    } else {
      zoom(plot().step(range(), xIn(canvas, event)), clamp(Math.exp(by * 0.002), 0.5, 2));
    }
  }, { passive: false });

  canvas.addEventListener("pointermove", (event) => {
    if (state.selection) return;
    const box = plot(), x = xIn(canvas, event) - box.left, view = state.view;
    if (x < 0 || x > box.width) return hideTip();
    const cols = columns(view, range(), box.width, "timeline");
    state.cursor = cols.perPixel ? cols.step[clamp(Math.floor(x), 0, box.width - 1)]
      : clamp(Math.floor(box.step(range(), x + box.left)), 0, view.steps - 1);
    state.pointerY = event.clientY - canvas.getBoundingClientRect().top;
    stepTip(view, event.clientX, event.clientY);
    redraw(drawTimeline);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("blur", hideTip);

  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], view = state.view;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") zoom(state.cursor ?? middle(), 0.5);
    else if (event.key === "-") zoom(state.cursor ?? middle(), 2);
    else if (event.key === "0") reset();
    else if (event.key === "Escape") hideTip();
    else if (by && event.shiftKey) {
      state.cursor = clamp((state.cursor ?? view.peakAt) + by, 0, view.steps - 1);
      state.pointerY = null;
      if (state.cursor < range().low || state.cursor + 1 > range().high) range().pan(state.cursor + 0.5 - middle());
      const at = canvas.getBoundingClientRect();
      stepTip(view, at.left + plot().x(range(), state.cursor + 0.5), at.top + 20);
      $("said").textContent = `Step ${state.cursor}, tensors ${bytes(view.live[state.cursor])},`
        + ` reserved ${bytes(view.reserved[state.cursor])}`;
      redraw(...both);
    } else if (by) {
      range().pan((by * range().span) / 10);
      redraw(...both);
    } else return;
    event.preventDefault();
  });

  // The strip below: drag the window, its edges, or a new span.
  onDrag($("overview"), (start) => {
    const all = new Range(state.view.steps, 1), at = (x) => plot().step(all, x), { low, high, whole } = range();
    const [left, right] = [low, high].map((step) => plot().x(all, step));
    const onLeft = !whole && Math.abs(start - left) < 7, onRight = !whole && Math.abs(start - right) < 7;
    const within = !whole && start > left && start < right;
    return {
      move(x) {
        if (onLeft) range().set(Math.min(at(x), high - 1), high);
        else if (onRight) range().set(low, Math.max(at(x), low + 1));
        else if (within) range().set(low + at(x) - at(start), high + at(x) - at(start));
        else range().set(Math.min(at(x), at(start)), Math.max(at(x), at(start)));
        redraw(...both);
      },
    };
  });
  $("overview").addEventListener("dblclick", reset);
}

// ---- Page map

const PAGES_AT_FIRST = 12;

// The colour of a module is that of the listed module it belongs to.
function moduleColour(view, name) {
  for (let at = name; at; at = at.slice(0, Math.max(0, at.lastIndexOf(".")))) {
    if (view.colours.module.has(at)) return view.colours.module.get(at);
  }
  return GREY;
}

function bufferColour(view, label) {
  const tensor = view.byName.get(label);
  if (!tensor) return view.colours[state.by].get(label) || hashed(label);
  return state.by === "category" ? view.colours.category.get(tensor.category) : moduleColour(view, tensor.module);
}

function buildPages(view) {
  $("pages-section").hidden = !view.pages.length;
  const total = view.pages.reduce((sum, page) => sum + page.bytes, 0);
  const lost = view.pages.reduce((sum, page) => sum + page.lost, 0);
  $("pages-sum").textContent = `${several(view.pages.length, "page")}, ${bytes(total)},`
    + ` of which ${bytes(lost)} lost (${percent(lost, total)}).`;
  const sorted = [...view.pages].sort((a, b) => b.bytes - a.bytes);
  view.strips = (state.allPages ? sorted : sorted.slice(0, PAGES_AT_FIRST)).map((page) => {
    const about = `${bytes(page.bytes)}, ${several(page.buffers, "buffer")},`
      + ` ${bytes(page.lost)} lost (${percent(page.lost, page.bytes)})`;
    const canvas = el("canvas", { role: "img", "aria-label": `Page ${page.name}: ${about}` });
    const at = (x) => page.range.low + (clamp(x, 0, canvas.clientWidth) / canvas.clientWidth) * page.range.span;
    zoomByDrag(canvas, () => page.range, at, drawPages);
    canvas.addEventListener("pointermove", (event) => {
      if (!state.selection) pageTip(view, page, at, canvas, event);
    });
    canvas.addEventListener("pointerleave", hideTip);
    const caption = el("div", { class: "caption" }, el("b", { class: "name" }, page.name),
      el("span", { class: "muted" }, about));
    return { page, canvas, node: el("div", { class: "page" }, caption, canvas) };
  });
  $("pages").replaceChildren(...view.strips.map((strip) => strip.node));
  $("pages-all").hidden = sorted.length <= PAGES_AT_FIRST;
  $("pages-all").textContent = state.allPages ? `Show the largest ${PAGES_AT_FIRST}`
    : `Show all ${sorted.length} pages`;
}

function drawPages(view) {
  for (const { page, canvas } of view.strips) {
    const { g, w, h } = surface(canvas), { range, spans } = page;
    for (const span of spans) {
      if (span.to <= range.low || span.from >= range.high) continue;
      const left = Math.max(0, ((span.from - range.low) / range.span) * w);
      const width = Math.min(w, ((span.to - range.low) / range.span) * w) - left;
      const colour = span.lost ? null : bufferColour(view, span.label);
      if (span.lost) {
        if (width > 0.3) hatch(g, left, 0, width, h);
      } else {
        g.fillStyle = colour;
        g.fillRect(left, 0, Math.max(width - (width > 4 ? 1 : 0), 0.5), h);
      }
      if (width > 34) {
        const text = fitted(g, span.lost ? `${bytes(span.to - span.from)} lost` : span.label, width - 10);
        g.textAlign = "left";
        if (span.lost) rimmed(g, text, left + 5, h / 2, ink.ink);
        else {
          g.fillStyle = isLight(colour) ? "#101214" : "#ffffff";
          g.fillText(text, left + 5, h / 2);
        }
      }
      if (state.pinned && span.label === state.pinned.name) {
        g.strokeStyle = ink.ink;
        g.lineWidth = 3;
        g.strokeRect(left + 1.5, 1.5, Math.max(2, width - 4), h - 3);
      }
    }
    drawSelection(g, canvas, 0, h);
  }
}

// As much of a name as fits: its leading parts go first (layers.3.query, 3.query, query), then its end.
function fitted(g, text, width) {
  const fits = (part) => g.measureText(part).width <= width;
  while (!fits(text) && /[. ]./.test(text)) text = text.replace(/^[^. ]*[. ]/, "");
  if (fits(text)) return text;
  let n = text.length - 1;
  while (n > 1 && !fits(`${text.slice(0, n)}…`)) n -= 1;
  return n > 1 ? `${text.slice(0, n)}…` : "";
}

function pageTip(view, page, at, canvas, event) {
  const x = xIn(canvas, event), offset = at(x);
  const [low, high] = [at(x - 0.5), at(x + 0.5)], near = page.spans.filter((span) => span.to > low && span.from < high);
  const span = near.find((s) => s.from <= offset && offset < s.to) || near[0];
  if (!span) return hideTip();
  const tensor = span.lost ? null : view.byName.get(span.label);
  showTip(event.clientX, event.clientY,
    el("div", { class: "head" }, span.lost ? "lost" : span.label),
    tipRow("size", bytes(span.to - span.from)),
    tipRow("offset", `${bytes(span.from)} (${count(span.from)})`),
    tipRow("page", page.name),
    ...(tensor ? [tipRow("operation", tensor.op), tipRow("shape", shape(tensor)), tipRow("category", tensor.category),
      tipRow("module", tensor.module)] : []),
    ...(near.length > 1 ? [tipRow("more at this pixel", count(near.length - 1))] : []));
}

// ---- Table

const ROW = 26, IN_SIGHT = 520 / ROW; // the height of a row and the table's, as in the style sheet
const shape = (t) => (t.shape || []).join("×") || "scalar";
const COLUMNS = [
  { key: "name", text: (t) => t.name },
  { key: "op", title: "operation", text: (t) => t.op },
  { key: "shape", text: shape, number: (t) => (t.shape || []).reduce((a, b) => a * b, 1) },
  { key: "dtype", title: "type", text: (t) => t.dtype },
  { key: "bytes", text: (t) => bytes(t.bytes), number: (t) => t.bytes },
  { key: "category", text: (t) => t.category },
  { key: "module", text: (t) => t.module },
  { key: "made", text: (t) => (t.made === null ? "before" : count(t.made)), number: (t) => t.made ?? -1 },
  { key: "freed", text: (t) => (t.freed === null ? "stays" : count(t.freed)), number: (t) => t.freed ?? Infinity },
  { key: "life", text: () => "", number: (t) => (t.freed ?? state.view.steps) - (t.made ?? 0), left: true },
];
const words = (t) => [t.name, t.op, shape(t), t.dtype, t.category, t.module].join(" ").toLowerCase();
const kind = (column) => `${column.key}${column.number && !column.left ? " number" : ""}`;
const collator = new Intl.Collator("en", { numeric: true });

function buildTable() {
  $("widths").append(...COLUMNS.map((column) => el("col", { class: column.key })));
  $("columns").append(...COLUMNS.map((column) => {
    const button = el("button", { type: "button" }, column.title || column.key);
    button.addEventListener("click", () => {
      const same = state.sort === column.key;
      state.ascending = same ? !state.ascending : !column.number; // numbers start with the largest
      state.sort = column.key;
      fillTable();
    });
    return el("th", { scope: "col", "data-key": column.key, class: kind(column) }, button);
  }));
  $("table").addEventListener("scroll", () => redraw(drawRows));
  $("filter").addEventListener("input", () => {
    state.words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    fillTable();
  });
}

// Filters and sorts, then draws the rows in sight.
function fillTable() {
  const { view } = state, column = COLUMNS.find((c) => c.key === state.sort), sign = state.ascending ? 1 : -1;
  view.texts ||= new Map(view.tensors.map((t) => [t, words(t)]));
  const { number } = column;
  state.shown = view.tensors.filter((t) => state.words.every((word) => view.texts.get(t).includes(word)));
  state.shown.sort(number ? (a, b) => sign * (number(a) < number(b) ? -1 : number(a) > number(b) ? 1 : 0)
    : (a, b) => sign * collator.compare(column.text(a), column.text(b)));
  for (const th of $("columns").children) {
    if (th.dataset.key === state.sort) th.setAttribute("aria-sort", state.ascending ? "ascending" : "descending");
    else th.removeAttribute("aria-sort");
  }
  $("tensors-section").hidden = !view.tensors.length;
  $("tensors-sum").textContent = `${count(state.shown.length)} of ${count(view.tensors.length)} tensors, `
    + bytes(state.shown.reduce((sum, t) => sum + t.bytes, 0));
  $("table").scrollTop = 0;
  drawRows(view);
}

// Only rows in sight are in the document; empty rows above and below keep the scroll bar true.
function drawRows(view) {
  const n = state.shown.length, fits = IN_SIGHT + 12;
  const first = state.printing ? 0 : clamp(Math.floor($("table").scrollTop / ROW) - 6, 0, Math.max(0, n - fits));
  const end = Math.min(n, state.printing ? 60 : first + fits);
  const gap = (rows) => {
    const cell = el("td", { class: "gap" });
    cell.style.height = `${state.printing ? 0 : rows * ROW}px`;
    return el("tr", { "aria-hidden": "true" }, cell);
  };
  const rows = state.shown.slice(first, end).map((tensor, i) => {
    const cells = COLUMNS.map((column) => {
      const text = column.text(tensor);
      const cell = el("td", { class: kind(column),
        title: column.key === "bytes" ? `${count(tensor.bytes)} B` : text }, text);
      if (column.key === "category") cell.prepend(swatch(view.colours.category.get(tensor.category) || GREY));
      if (column.key === "life" && view.steps) cell.append(life(view, tensor));
      return cell;
    });
    const row = el("tr", { "aria-rowindex": first + i + 2, "aria-selected": tensor === state.pinned }, ...cells);
    row.addEventListener("click", () => {
      state.pinned = state.pinned === tensor ? null : tensor;
      redraw(drawRows, drawTimeline, drawPages);
    });
    return row;
  });
  $("rows").replaceChildren(gap(first), ...rows, gap(n - end));
  $("table").firstElementChild.setAttribute("aria-rowcount", n + 1);
  $("rows-left").textContent = end < n ? `and ${count(n - end)} more` : "";
}

// A small bar: when in the step the tensor is alive, and the peak.
function life(view, tensor) {
  const at = (step) => `${(100 * step) / view.steps}%`, from = tensor.made ?? 0;
  const bar = el("i"), peak = el("i", { class: "peak" });
  bar.style.left = at(from);
  bar.style.width = at((tensor.freed ?? view.steps) - from);
  peak.style.left = at(view.peakAt);
  return el("span", { class: "life" }, bar, peak);
}

// ---- Header, tabs, advice

function buildTabs() {
  $("tabs").hidden = data.plans.length < 2;
  $("tabs").replaceChildren(...data.plans.map((plan, i) => {
    const share = plan.peak && plan.budget ? `, ${percent(plan.peak, plan.budget)}` : "";
    const verdict = el("span", { class: plan.fits ? "good" : "bad" }, (plan.fits ? "fits" : "does not fit") + share);
    const tab = el("button", { type: "button", role: "tab", "aria-controls": "main" }, el("b", {}, plan.card),
      `${plan.allocator}: `, verdict);
    tab.addEventListener("click", () => select(i));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      select((i + by + data.plans.length) % data.plans.length);
      $("tabs").querySelector("[aria-selected=true]").focus();
    });
    return tab;
  }));
}

function buildSummary(view) {
  const { plan } = view, { peak, budget, in_use: use } = plan, split = String(plan.split).replace(/\s*x\s*/g, " × ");
  $("sentence").replaceChildren(el("b", {}, plan.card), ` with ${plan.allocator}: a batch of ${count(plan.batch)} `,
    plan.micro_batches > 1 ? `in ${plan.micro_batches} micro-batches (${split}) ` : "in one piece ",
    el("b", { class: plan.fits ? "good" : "bad" }, plan.fits ? "fits" : "does not fit"),
    ...(peak ? [", with a peak of ", el("b", {}, bytes(peak)), ` of ${bytes(budget)}.`] : ["."]));
  const at = (n) => `${(100 * (n || 0)) / Math.max(peak || 0, budget || 0, 1)}%`;
  const spans = [["peak", 0, peak], ["use", 0, use], ["over", budget, peak], ["budget", 0, budget]];
  const bars = spans.map(([name, from, to]) => {
    const bar = el("div", { class: name });
    bar.style.left = at(from);
    bar.style.width = at(Math.max(0, to - from));
    return bar;
  });
  $("gauge").replaceChildren(...bars);
  $("gauge").setAttribute("aria-label", `${percent(peak || 0, budget)} of the budget`);
  $("gauge").hidden = $("gauge-text").hidden = !peak;
  const room = budget - peak;
  $("gauge-text").textContent = `${percent(peak, budget)} of the budget reserved at the peak, `
    + `${bytes(Math.abs(room))} ${room < 0 ? "over it" : "to spare"}; ${bytes(use || 0)} in use`
    + (plan.estimate ? ` (estimate: ${plan.estimate})` : "");
  $("message").textContent = plan.message || "";
  $("message").hidden = !plan.message;
}

function buildAdvice({ plan }) {
  const advice = plan.advice || [];
  $("advice-section").hidden = !advice.length;
  $("advice").replaceChildren(...advice.map(({ what, saves }) => {
    const text = el("div", {}, el("b", {}, what));
    return el("li", {}, el("b", { class: "number" }, bytes(saves)), text);
  }));
}

function select(index) {
  const view = (state.views[index] ||= prepare(data.plans[index]));
  Object.assign(state, { view, cursor: null, pinned: null, selection: null });
  $("tip").hidden = true;
  [...$("tabs").children].forEach((tab, i) => {
    tab.setAttribute("aria-selected", i === index);
    tab.tabIndex = i === index ? 0 : -1;
  });
  buildSummary(view);
  $("timeline-section").hidden = !view.steps;
  $("timeline").setAttribute("aria-label", `Memory over ${count(view.steps)} steps; the most reserved is `
    + `${bytes(view.reservedTop)}, the most in use ${bytes(view.liveTop)}, at step ${count(view.peakAt)}`);
  buildLegend(view);
  buildPages(view);
  buildAdvice(view);
  fillTable();
  redraw(drawTimeline, drawOverview, drawPages);
  flush();
}

function setTheme(theme) {
  root.dataset.theme = theme;
  $("theme").textContent = `${capital(theme === "dark" ? "light" : "dark")} theme`;
  readInks();
  if (state.view) redraw(drawTimeline, drawOverview, drawPages);
}

function setBy(by) {
  state.by = by;
  buildLegend(state.view);
  redraw(drawTimeline, drawPages);
}

function start() {
  if (!data || !data.plans || !data.plans.length) throw new Error("this report holds no plan");
  document.title = `${data.title} | firebox`;
  $("title").textContent = data.title;
  $("subtitle").textContent = data.subtitle || "";
  // A budget far above everything would flatten the chart; a click in the legend brings it in.
  if (data.plans.every((plan) => plan.peak < 0.35 * plan.budget)) state.hidden.add("budget");
  setTheme(root.dataset.theme);
  buildTabs();
  buildTable();
  listenToTimeline();
  select(0);

  const system = matchMedia("(prefers-color-scheme: dark)"), follow = () => setTheme(system.matches ? "dark" : "light");
  if (!/^#(dark|light)$/.test(location.hash)) system.addEventListener("change", follow);
  $("theme").addEventListener("click", () => {
    system.removeEventListener("change", follow); // from now on the reader's choice holds
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
  });
  $("by").addEventListener("click", (event) => { if (event.target.dataset.by) setBy(event.target.dataset.by); });
  $("pages-all").addEventListener("click", () => {
    state.allPages = !state.allPages;
    buildPages(state.view);
    redraw(drawPages);
  });
  let width = $("main").clientWidth;
  new ResizeObserver(() => {
    if (width === $("main").clientWidth) return;
    width = $("main").clientWidth;
    redraw(drawTimeline, drawOverview, drawPages, drawRows);
  }).observe($("main"));
  let theme;
  window.addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    state.printing = true;
    setTheme("light");
    redraw(drawRows);
    flush();
  });
  window.addEventListener("afterprint", () => {
    state.printing = false;
    setTheme(theme);
    redraw(drawRows);
  });
}

// ---- Self-test, run by #selftest: uses the page as a reader would and looks at the outcome

function selfTest() {
  const done = [];
  const check = (truth, what) => {
    if (!truth) throw new Error(`failed: ${what} (after ${done.length} checks)`);
    done.push(what);
  };
  const fire = (target, type, options) => {
    const kind = type.startsWith("pointer") ? PointerEvent : type.startsWith("key") ? KeyboardEvent
      : type === "wheel" ? WheelEvent : MouseEvent;
    target.dispatchEvent(new kind(type, { bubbles: true, cancelable: true, button: 0, ...options }));
    flush();
  };
  const click = (node, options) => fire(node, "click", options);
  const pixel = (canvas, x, y) => {
    const ratio = canvas.width / canvas.clientWidth;
    return [...canvas.getContext("2d").getImageData(Math.floor(x * ratio), Math.floor(y * ratio), 1, 1).data].join();
  };
  const rgb = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)).concat(255).join();
  const firstRow = () => $("rows").children[1];
  const point = (canvas, x, y) => {
    const at = canvas.getBoundingClientRect();
    return { clientX: at.left + x, clientY: at.top + y };
  };

  const testTimeline = (view) => {
    const canvas = $("timeline"), box = plot(), { range, peakAt, plan } = view;
    const marked = point(canvas, box.x(range, peakAt + 0.5), box.top + box.height - 2);

    // Hover at the peak
    fire(canvas, "pointermove", marked);
    const text = $("tip").textContent;
    check(!$("tip").hidden && text.includes(`Step ${count(peakAt)}, the peak`), "the tooltip names the peak");
    const sumAt = (series) => (series || []).slice(0, peakAt + 1).reduce((sum, by) => sum + by, 0);
    const reserved = bytes(sumAt(plan.reserved)), live = bytes(sumAt(plan.live));
    check(text.includes(`reserved${reserved}`), "the tooltip has the bytes reserved at the peak");
    check(text.includes(`tensors${live}`), "the tooltip has the bytes in use at the peak");
    check(!plan.ops?.length || text.includes(plan.names[plan.ops[peakAt]]), "the tooltip has the operation");
    const [most] = [...parts()].sort((a, b) => b.values[peakAt] - a.values[peakAt]);
    check(!most || text.includes(most.name + bytes(most.values[peakAt])), "the tooltip has the largest part");
    fire(canvas, "pointerleave");
    check($("tip").hidden, "the tooltip goes away");
    check($("legend").children[1].textContent === `reserved${reserved}`, "the legend has what is reserved at the peak");
    check($("legend").children[2].textContent === `tensors${live}`, "the legend has what is in use at the peak");
    const { step: drawnSteps, reserved: tops } = columns(view, range, box.width, "timeline");
    const highest = largest(drawnSteps.map((step) => view.live[step]));
    check(highest === view.liveTop || drawnSteps.includes(peakAt), "the most in use is drawn");
    const low = drawnSteps.filter((step, i) => view.live[step] < view.live[Math.floor((i * view.steps) / box.width)]);
    check(view.steps <= box.width || low.every((step) => step === peakAt), "each pixel shows its highest step");
    check(largest(tops) === view.reservedTop, "the most reserved is drawn");

    // What is drawn: the middle of the largest part, at a pixel away from all lines
    const stepAt = (x) => {
      const cols = columns(view, range, box.width, "timeline");
      return cols.perPixel ? cols.step[x] : Math.floor(box.step(range, box.left + x));
    };
    const lines = [...view.marks.map((mark) => mark.at), peakAt + 0.5].map((at) => box.x(range, at) - box.left);
    const calm = (x) => lines.every((at) => Math.abs(at - x) > 5) && [-3, 3].every((by) =>
      Math.abs(view.live[stepAt(x + by)] - view.live[stepAt(x)]) < view.live[stepAt(x)] / 8);
    const free = [...Array(box.width - 6).keys()].map((x) => x + 3).find((x) => x > box.width / 4 && calm(x));
    const step = stepAt(free ?? 0), [big] = [...parts()].sort((a, b) => b.values[step] - a.values[step]);
    const drawn = () => {
      let base = 0;
      for (const part of parts()) {
        if (part === big) break;
        if (visible(part.key)) base += part.values[step];
      }
      const middle = (base + big.values[step] / 2) / ceiling(view);
      return pixel(canvas, box.left + free + 0.5, box.top + box.height * (1 - middle));
    };
    const testable = big && free !== undefined && big.values[step] > ceiling(view) / 20;
    if (testable) check(drawn() === rgb(big.colour), `the area of ${big.name} is drawn`);

    // Legend
    const entry = testable && view.legend.find((e) => e.key === big.key);
    if (entry) {
      const before = ceiling(view), pressed = () => entry.button.getAttribute("aria-pressed") === "true";
      click(entry.button);
      check(!pressed() && drawn() !== rgb(big.colour), "a click hides a part");
      check(ceiling(view) <= before, "the axis does not grow when a part is hidden");
      click(entry.button);
      check(pressed() && drawn() === rgb(big.colour), "a click shows it again");
      click(entry.button, { shiftKey: true });
      check(view.legend.filter((e) => visible(e.key)).length === 1, "shift and click shows it alone");
      click(entry.button, { shiftKey: true });
      check(view.legend.every((e) => visible(e.key)), "shift and click again shows all");
    }

    if (view.steps >= 64) testZoom(view, marked);

    // Areas by module and by category
    for (const by of ["module", "category"]) {
      click(document.querySelector(`#by [data-by=${by}]`));
      const names = [...$("legend").querySelectorAll(".name")].slice(3).map((node) => node.textContent).reverse();
      const wanted = (plan[by === "module" ? "modules" : "categories"] || []).map((part) => part.name);
      check(names.join("\n") === wanted.join("\n"), `the legend lists what is shown by ${by}`);
    }
  };

  const testZoom = (view, marked) => {
    const canvas = $("timeline"), box = plot(), { range, peakAt } = view, full = range.span;
    fire(canvas, "wheel", { ...marked, deltaY: -400 });
    check(range.span < full && range.low <= peakAt && range.high > peakAt, "the wheel zooms in around the pointer");
    const held = range.span;
    fire(canvas, "wheel", { ...marked, deltaY: 200 });
    check(range.span > held, "the wheel zooms out");
    click($("zoom-reset"));
    check(range.whole, "the button shows the whole step");
    const [from, to] = [box.left + box.width * 0.25, box.left + box.width * 0.5];
    fire(canvas, "pointerdown", point(canvas, from, 100));
    fire(window, "pointermove", point(canvas, to, 100));
    check(state.selection && $("tip").hidden, "dragging marks a span");
    fire(window, "pointerup", point(canvas, to, 100));
    const near = (a, b) => Math.abs(a - b) < 9 + full / 500;
    check(!state.selection && near(range.low, full * 0.25), "the span begins where the drag began");
    check(near(range.high, full * 0.5), "the span ends where the drag ended");
    check($("span").textContent.includes(count(Math.floor(range.low))), "the heading says which steps are shown");
    const low = range.low, span = range.span;
    fire(canvas, "keydown", { key: "ArrowRight" });
    check(range.low > low || range.high === full, "the right arrow moves");
    fire(canvas, "keydown", { key: "ArrowLeft" });
    check(Math.abs(range.low - low) < 1e-6, "the left arrow moves back");
    fire(canvas, "keydown", { key: "+" });
    check(range.span < span || span === range.least, "plus zooms in");
    fire(canvas, "keydown", { key: "-" });
    check(Math.abs(range.span - span) < 1e-6 || range.span > span, "minus zooms out");
    fire(canvas, "keydown", { key: "0" });
    check(range.whole, "0 shows the whole step");
    range.set(peakAt - 20, peakAt + 20);
    fire(canvas, "keydown", { key: "ArrowRight", shiftKey: true });
    check(state.cursor === Math.min(peakAt + 1, view.steps - 1), "shift and arrow goes one step on from the peak");
    check($("said").textContent.includes(bytes(view.live[state.cursor])), "the step is said");
    fire(canvas, "keydown", { key: "Escape" });
    fire(canvas, "dblclick");
    check(range.whole, "a double click shows the whole step");
    fire($("overview"), "pointerdown", point($("overview"), from, 10));
    fire(window, "pointermove", point($("overview"), to, 10));
    fire(window, "pointerup", point($("overview"), to, 10));
    check(near(range.low, full * 0.25) && near(range.high, full * 0.5), "the overview sets the span");
    fire($("overview"), "dblclick");
    check(range.whole, "a double click on the overview shows the whole step");
  };

  const testTable = (view) => {
    const drawnTo = [...$("rows").children].at(-2).getBoundingClientRect().bottom;
    check(drawnTo >= $("table").getBoundingClientRect().bottom - 2, "rows fill the table");
    for (const th of [...$("columns").children]) {
      const column = COLUMNS.find((c) => c.key === th.dataset.key);
      for (let turn = 0; turn < 2; turn++) {
        click(th.firstChild);
        const way = th.getAttribute("aria-sort"), values = state.shown.map(column.number || column.text);
        check(/^(a|de)scending$/.test(way), "aria-sort is set");
        check(document.querySelectorAll("th[aria-sort]").length === 1, "aria-sort is set on one column");
        const wrong = values.findIndex((value, i) => i && (way === "ascending" ? 1 : -1)
          * (column.number ? Math.sign(values[i - 1] - value || 0) : collator.compare(values[i - 1], value)) > 0);
        check(wrong < 0, `rows are ${way} by ${column.key}`);
        check(firstRow().children[0].textContent === state.shown[0].name, `the first row by ${column.key} is drawn`);
      }
    }
    const most = largest(view.tensors.map((t) => t.bytes)), size = COLUMNS.findIndex((c) => c.key === "bytes");
    const head = $("columns").children[size].firstChild;
    click(head);
    if (state.ascending) click(head);
    check(firstRow().children[size].textContent === bytes(most), "the first row by bytes is the largest");

    const sample = view.tensors[view.tensors.length >> 1].name.toLowerCase();
    const wanted = view.tensors.filter((t) => words(t).includes(sample));
    const type = (value) => { $("filter").value = value; fire($("filter"), "input"); };
    if (!/\s/.test(sample)) {
      type(sample);
      check(state.shown.length === wanted.length && wanted.length > 0, "the filter keeps what holds the text");
      check($("tensors-sum").textContent === `${count(wanted.length)} of ${count(view.tensors.length)} tensors, `
        + bytes(wanted.reduce((sum, t) => sum + t.bytes, 0)), "the sum is that of the rows shown");
    }
    type("no tensor is called so");
    check(state.shown.length === 0 && $("rows").textContent === "", "a filter without a match empties the table");
    type("");
    check(state.shown.length === view.tensors.length, "without a filter all tensors are back");
    $("table").scrollTop = 1e9;
    drawRows(view);
    check([...$("rows").children].at(-2).textContent.startsWith(state.shown.at(-1).name), "the last row is drawn");
    check($("rows").children.length < 200, "only the rows in sight are in the document");
    $("table").scrollTop = 0;
    drawRows(view);
    click(firstRow());
    const chosen = state.pinned === state.shown[0] && firstRow().getAttribute("aria-selected") === "true";
    check(chosen, "a click chooses a tensor");
    click(firstRow());
    check(state.pinned === null, "another click lets it go");
  };

  const testPages = (view) => {
    for (const { page, canvas } of view.strips.slice(0, 12)) {
      const covered = page.spans.reduce((sum, span) => sum + (span.lost ? span.to - span.from : 0), 0);
      check(page.lost === covered && page.lost <= page.bytes, "the gaps add up to what is lost");
      const span = [...page.spans].sort((a, b) => b.to - b.from - (a.to - a.from))[0];
      const x = ((span.from + span.to) / 2 / page.bytes) * canvas.clientWidth;
      fire(canvas, "pointermove", point(canvas, x, 10));
      check($("tip").textContent.includes(span.lost ? "lost" : span.label), "the tooltip names the buffer");
      check($("tip").textContent.includes(bytes(span.to - span.from)), "the tooltip has the size of the buffer");
      check(pixel(canvas, Math.min(x, canvas.clientWidth - 1), 2) !== "0,0,0,0", "the page is drawn");
      fire(canvas, "pointerleave");
    }
    if ($("pages-all").hidden) return;
    click($("pages-all"));
    check($("pages").children.length === view.pages.length, "the button shows all pages");
    click($("pages-all"));
    check($("pages").children.length === PAGES_AT_FIRST, "the button shows the largest pages again");
  };

  const testPlan = (index) => {
    if (data.plans.length > 1) click($("tabs").children[index]);
    const { view } = state, { plan } = view;
    check(plan === data.plans[index], "the tab shows its plan");
    const tabs = [...$("tabs").children].map((tab) => tab.getAttribute("aria-selected") === "true");
    check(tabs.indexOf(true) === index && tabs.lastIndexOf(true) === index, "one tab is chosen");
    check($("sentence").textContent.includes(plan.card), "the sentence names the card");
    check($("sentence").textContent.includes(plan.fits ? "fits" : "does not fit"), "the sentence says whether it fits");
    check(!plan.peak || $("sentence").textContent.includes(bytes(plan.peak)), "the sentence has the peak");
    check($("message").textContent === (plan.message || ""), "the message is shown");
    check($("timeline-section").hidden === !view.steps, "the timeline is shown if there is one");
    check($("advice").children.length === (plan.advice || []).length, "all advice is listed");
    if (view.steps) testTimeline(view);
    if (view.tensors.length) testTable(view);
    testPages(view);
  };

  const hiddenBefore = new Set(state.hidden);
  state.hidden.clear();
  buildLegend(state.view);
  check($("tabs").hidden === (data.plans.length < 2), "tabs are shown if there are several plans");
  data.plans.forEach((_, index) => testPlan(index));
  select(0);
  const before = root.dataset.theme, ground = () => getComputedStyle(document.body).backgroundColor, old = ground();
  click($("theme"));
  check(root.dataset.theme !== before && ground() !== old, "the button changes the theme");
  click($("theme"));
  check(root.dataset.theme === before && ground() === old, "the button changes it back");
  check(!("data" in window) && !("state" in window), "nothing is global");
  state.hidden = hiddenBefore;
  buildLegend(state.view);
  redraw(drawTimeline);
  flush();
  return done.length;
}

const report = (error) => { root.dataset.error = String((error && error.message) || error); };
window.addEventListener("error", (event) => report(event.error || event.message));
try {
  start();
  root.dataset.ready = Math.round(performance.now());
} catch (error) {
  report(error);
  $("main").replaceChildren(el("section", {}, `This report cannot be shown: ${root.dataset.error}`));
}
if (location.hash === "#selftest" && !root.dataset.error) {
  try {
    root.dataset.checks = selfTest();
    root.dataset.selftest = "ok";
  } catch (error) {
    root.dataset.selftest = String(error.message || error);
  }
}
