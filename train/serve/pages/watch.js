// The page of `wgrad watch`, which shows runs next to each other while they continue.
"use strict";

import { el, fill, place, setText } from "/pages/page.js";
import { Charts, Series, color, written } from "/pages/charts.js";

const EVERY = 1000, AGAIN = 4000;  // milliseconds between requests, and after a failed one
const MOST_SAMPLES = 100;
const charts = new Charts(place("charts"));
let server = null, runs = [];

const shownRuns = () => runs.filter((run) => run.shown);
const number = (value) => written(value ?? null);

// Add the server's news of a run, and return whether there is more to ask for.
function take(run, news) {
  Object.assign(run, { name: news.name, there: news.there, silent: news.silent_seconds });
  const passed = news.metrics.passed_over + news.samples.passed_over;
  const note = `${passed} invalid line${passed > 1 ? "s" : ""} skipped`;
  return run.series.take({ ...news, notes: passed ? [...news.notes, note] : news.notes });
}

function heldOut(run) {  // without --eval-every a run has this loss only in its results
  const after = Number(run.series.results?.held_out_loss_after ?? NaN);
  return run.series.last("held_out_loss") ?? (Number.isFinite(after) ? after : null);
}

function stateOf(run) {
  const step = run.series.step, result = run.series.results?.steps, silent = run.silent;
  if (!run.there) return "not there yet";
  if (result !== undefined && !(step > Number(result))) return "done";
  if (step === undefined) return "no step yet";
  const news = silent === null ? "" : silent < 120 ? `last news ${silent} s ago` : `last news ${Math.round(silent / 60)} min ago`;
  return result !== undefined ? `continues after results at step ${result}, ${news}` : news;
}

// ---- tables -------------------------------------------------------------------------------------
function drawRuns() {
  for (const run of runs) {
    if (!run.row) {
      run.label = el("span");
      const box = el("input", { type: "checkbox", checked: true, onchange: () => { run.shown = box.checked; draw(); } });
      const label = el("label", { class: "row" }, box, el("span", { class: color(run.number) }, "●"), run.label);
      run.cells = Array.from({ length: 6 }, (_, i) => el("td", { class: i === 5 ? "bad" : i ? "number" : "" }));
      run.row = place("runs").appendChild(el("tr", {}, el("th", {}, label), ...run.cells));
    }
    setText(run.label, run.name);
    const { series } = run;
    const texts = [String(series.step ?? "–"), number(series.last("loss")), number(heldOut(run)), number(series.last("tokens_per_second"))];
    [stateOf(run), ...texts, series.notes.join("; ")].forEach((text, i) => setText(run.cells[i], text));
  }
}

// A table with a column for each run. Names of rows that differ between runs are bold.
function compared(key, onlyDiffering) {
  const those = shownRuns().filter((run) => Object.keys(run.series[key] ?? {}).length);
  const names = new Set(those.flatMap((run) => Object.keys(run.series[key])));
  const head = el("tr", {}, el("th"), ...those.map((run) => el("th", { class: color(run.number) }, run.name)));
  const rows = [...names].map((name) => {
    const texts = those.map((run) => (Object.hasOwn(run.series[key], name) ? run.series[key][name] : "–"));
    const differs = texts.some((text) => text !== texts[0]);
    if (onlyDiffering && !differs) return null;
    return el("tr", {}, el("th", {}, differs ? el("strong", {}, name) : name), ...texts.map((text) => el("td", {}, String(text))));
  });
  return those.length ? [el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows.filter(Boolean)))] : [];
}

const folded = (run, inside) =>
  el("details", { open: true }, el("summary", { class: color(run.number) }, run.name), el("div", { class: "scroll" }, inside));

function samplesOf(run) {
  const head = el("tr", {}, el("th", {}, "step"), el("th", {}, "prompt"), el("th", {}, "continuation"));
  const rows = run.series.samples.slice(-MOST_SAMPLES).reverse().map(({ step, prompt, text }) =>
    el("tr", {}, el("td", { class: "number" }, String(step)), el("td", {}, prompt), el("td", {}, text ?? "(the model's outputs were not finite)")));
  return folded(run, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

// Fill a section, and hide it if it is empty.
function section(id, signature, make) {
  const inside = place(id).lastElementChild;
  if (fill(inside, signature, make)) place(id).hidden = !inside.children.length;
}

function drawTables() {
  const shown = shownRuns(), of = (key) => shown.map((run) => [run.name, run.series[key] ?? null]);
  const only = place("differing").checked;
  section("samples", shown.map((run) => [run.name, run.series.have.slice(2)]), () => shown.filter((run) => run.series.samples.length).map(samplesOf));
  section("results", of("results"), () => compared("results", false));
  section("profile", of("profile"), () => shown.filter((run) => run.series.profile).map((run) => folded(run, el("pre", {}, run.series.profile))));
  section("options", [of("options"), only], () => compared("options", only));
}

function draw() {
  drawRuns();
  charts.draw(shownRuns(), { log: place("log").checked, smoothing: Number(place("smoothing").value) });
  drawTables();
}

// ---- news ---------------------------------------------------------------------------------------
function say(text, bad = false) {
  setText(place("status"), text);
  place("status").classList.toggle("bad", bad);
}

async function ask() {
  const have = runs.length ? `?have=${runs.map((run) => run.series.have.join(".")).join(",")}` : "";
  const answer = await fetch(`/news${have}`, { cache: "no-store" });
  if (!answer.ok) {
    if (answer.status === 400) location.reload();
    throw new Error(`${answer.status} ${await answer.text()}`);
  }
  const news = await answer.json();
  if (server !== null && server !== news.server) location.reload();  // a restarted server counts records anew
  server = news.server;
  if (!runs.length) runs = news.runs.map((_, at) => ({ number: at, shown: true, series: new Series() }));
  const more = news.runs.map((one, at) => take(runs[at], one)).some(Boolean);
  draw();
  say(`${runs.length} run${runs.length === 1 ? "" : "s"}, refreshed every second`);
  return more;
}

async function follow() {
  let wait = EVERY;
  try {
    if (await ask()) wait = 0;
  } catch (error) {
    wait = AGAIN;
    say(`No answer from wgrad watch (${error.message}). The page shows the last known state and tries again.`, true);
  }
  setTimeout(follow, wait);
}

for (const id of ["log", "smoothing", "differing"]) place(id).addEventListener("input", draw);
follow();
