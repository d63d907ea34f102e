// Charts of runs in the studio and in `wgrad watch`, drawn by uPlot: one chart for each metric, one line for each run.
"use strict";

import { el } from "/pages/page.js";

const TITLES = new Map([
  ["loss", "Loss"], ["held_out_loss", "Held-out loss"], ["lr", "Learning rate"], ["tokens_per_second", "Tokens per second"],
  ["memory_bytes", "Device memory, MiB"], ["grad_norm", "Gradient norm"],
]);
const HIDDEN = new Set(["step", "tokens"]);
const exact = (key) => key === "lr" || key === "memory_bytes" || key.startsWith("held_out");  // metrics without noise, which are not smoothed
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];  // tell lines apart without color
const MOST_CHARTS = 24, HEIGHT = 240, COLORS = 8;

// Class of the color of a run's number.
export const color = (number) => `k${number % COLORS}`;

// Format a number for tables; "–" if there is none.
export function written(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  return size >= 1e6 || (size < 1e-2 && size > 0) ? value.toExponential(2) : size >= 1000 ? value.toFixed(0) : value.toPrecision(4);
}

// Exponential moving average with bias correction. Gaps (null) stay gaps.
export function smoothed(values, weight) {
  let sum = 0, count = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    count += 1;
    return sum / (1 - weight ** count);
  });
}

// Index of the value nearest to a step, or -1 if there is none. Of two at the same distance it is the earlier one.
export function nearest({ steps, values }, step) {
  const far = (at) => (at < 0 ? Infinity : Math.abs(steps[at] - step));
  return values.reduce((best, value, at) => (value !== null && far(at) < far(best) ? at : best), -1);
}

// The contents of a run's files so far. have: generations and numbers of records read, which the server continues from.
export class Series {
  constructor() { this.reset(); this.have = [0, 0, 0, 0]; this.samples = []; this.options = {}; this.results = null; this.notes = []; }

  reset() { this.keys = new Map(); this.changes = (this.changes ?? 0) + 1; }

  // Add the server's news, and return whether there is more to ask for.
  take(news) {
    if (news.metrics.anew) this.reset();
    for (const record of news.metrics.records)
      for (const [key, value] of Object.entries(record)) if (!HIDDEN.has(key)) this.add(key, record.step, value);
    if (news.metrics.records.length) this.changes += 1;
    if (news.samples.anew) this.samples = [];
    this.samples.push(...news.samples.records);
    const counted = (part, at) => [part.generation, (part.anew ? 0 : this.have[at]) + part.records.length];
    this.have = [...counted(news.metrics, 1), ...counted(news.samples, 3)];
    Object.assign(this, { options: news.options ?? {}, results: news.results, profile: news.profile, notes: news.notes });
    return news.metrics.more || news.samples.more || news.more;
  }

  // If steps go back within a file, as after resuming, later values replace earlier ones.
  add(key, step, value) {
    if (!this.keys.has(key)) this.keys.set(key, { steps: [], values: [] });
    const { steps, values } = this.keys.get(key);
    while (steps.length && steps.at(-1) >= step) { steps.pop(); values.pop(); }
    steps.push(step);
    values.push(key === "memory_bytes" && value !== null ? value / 2 ** 20 : value);
  }

  last(key) { return this.keys.get(key)?.values.at(-1); }
  get step() { return this.keys.get("loss")?.steps.at(-1); }
}

class Chart {
  constructor(key) {
    this.key = key;
    this.values = el("div", { class: "chart-values", "aria-hidden": "true" });
    this.plot = el("div", { role: "img" });
    this.figure = el("figure", { class: "chart card" }, el("figcaption", {}, TITLES.get(key) ?? key), this.values, this.plot);
    this.figure.dataset.key = key;
    this.signature = "";
    new ResizeObserver(() => this.uplot && this.uplot.setSize({ width: this.plot.clientWidth, height: HEIGHT })).observe(this.plot);
  }

  // runs: { name, number, series }. look: { log, smoothing }. range: first and last step of all charts.
  draw(runs, look, range) {
    const shown = runs.filter((run) => run.series.keys.has(this.key));
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const signature = JSON.stringify([shown.map((run) => [run.name, run.number, run.series.changes]), look, range, dark]);
    if (signature === this.signature) return;
    this.signature = signature;
    const style = getComputedStyle(document.documentElement), weight = exact(this.key) ? 0 : look.smoothing;
    const value = (name) => style.getPropertyValue(name).trim();
    const tables = [], lines = [{}];
    for (const run of shown) {
      const { steps, values } = run.series.keys.get(this.key), stroke = value(`--c${run.number % COLORS}`);
      const usable = values.map((v) => (look.log && v !== null && v <= 0 ? null : v));
      tables.push(weight ? [steps, usable, smoothed(usable, weight)] : [steps, usable]);
      const line = { label: run.name, stroke, width: 2, dash: DASHES[run.number % DASHES.length], spanGaps: this.key === "held_out_loss", points: { show: steps.length < 30, size: 5 } };
      lines.push(weight ? { ...line, stroke: `${stroke}55`, width: 1, points: { show: false } } : line);
      if (weight) lines.push(line);
    }
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const axis = { stroke: value("--soft"), grid: { stroke: value("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    this.uplot?.destroy();
    this.uplot = new uPlot({
      width: this.plot.clientWidth || 400, height: HEIGHT, legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: false, range: () => range }, y: { distr: look.log ? 3 : 1, ...(look.log ? {} : { range: this.room }) } },
      axes: [{ ...axis, size: 32, values: (_, ticks) => ticks.map((t) => (Number.isInteger(t) ? t : "")) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((t) => (t === null ? "" : Number(t.toPrecision(4)).toString().length > 7 ? t.toExponential(0) : Number(t.toPrecision(4)))) }],
      series: lines,
      hooks: { setCursor: [(plot) => this.tell(plot, shown)] },
    }, data, this.plot);
    this.shownLast(shown);
  }

  // Range of the vertical axis. Memory starts at 0, and changes below 2 % do not fill the height.
  room = (_, low, high) => {
    if (low === null || high === null) return [0, 1];
    if (this.key === "memory_bytes") return [0, high * 1.15 || 1];
    const least = Math.abs(high) * 0.02 || 1, more = Math.max((high - low) * 0.06, (least - (high - low)) / 2);
    return [low - more, high + more];
  };

  // Show the last value of each run, also to screen readers.
  shownLast(shown) {
    const last = shown.map((run) => [run, run.series.last(this.key), run.series.keys.get(this.key).steps]);
    const words = last.map(([run, value, steps]) => `${run.name}: ${written(value)} at step ${steps.at(-1)}, ${steps.length} values`);
    this.plot.setAttribute("aria-label", `${TITLES.get(this.key) ?? this.key}. ${words.join("; ")}`);
    this.values.replaceChildren(...last.map(([run, value]) => el("span", { class: color(run.number) }, `${run.name} ${written(value)}`)));
  }

  // Show the values at the cursor. Runs have different steps, so this takes each run's nearest one.
  tell(plot, shown) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) { this.shownLast(shown); return; }
    const step = plot.data[0][at];
    this.values.replaceChildren(el("span", { class: "soft" }, `step ${step}`), ...shown.map((run) => {
      const { steps, values } = run.series.keys.get(this.key), near = nearest({ steps, values }, step);
      const where = near < 0 || steps[near] === step ? "" : ` (step ${steps[near]})`;
      return el("span", { class: color(run.number) }, `${run.name} ${written(values[near])}${where}`);
    }));
  }
}

// Range of steps of all charts, which is the same so that they can be compared.
function stepsOf(runs, keys) {
  let from = Infinity, to = -Infinity;
  for (const run of runs) for (const key of keys) {
    const steps = run.series.keys.get(key)?.steps ?? [];
    if (steps.length) { from = Math.min(from, steps[0]); to = Math.max(to, steps.at(-1)); }
  }
  return from < to ? [from, to] : [from - 1, from + 1];
}

export class Charts {
  constructor(where) {
    this.where = where;
    this.charts = new Map();
    this.again = () => {};
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
  }

  draw(runs, look) {
    this.again = () => this.draw(runs, look);
    const names = new Set(runs.flatMap((run) => [...run.series.keys].filter(([, { values }]) => values.some((v) => v !== null)).map(([key]) => key)));
    const known = [...TITLES.keys()].filter((key) => names.has(key));
    const keys = [...known, ...[...names].filter((key) => !TITLES.has(key)).sort()].slice(0, MOST_CHARTS);
    for (const key of keys) if (!this.charts.has(key)) this.charts.set(key, new Chart(key));
    const wanted = keys.map((key) => this.charts.get(key).figure), there = [...this.where.children];
    if (wanted.length !== there.length || wanted.some((figure, i) => figure !== there[i])) this.where.replaceChildren(...wanted);
    const range = stepsOf(runs, keys);
    for (const key of keys) this.charts.get(key).draw(runs, look, range);
  }
}
