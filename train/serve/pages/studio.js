// The page of `wgrad studio`.
"use strict";

import { Chat } from "/pages/chat.js";
import { Charts, Series, color, written } from "/pages/charts.js";
import { ask, el, fill, place, request, setText } from "/pages/page.js";

const FEW = 10;  // runs that are overlooked at a glance
const EVERY = 1000, AGAIN = 4000, TYPING = 400;  // milliseconds between requests, after a failed one, and after a key
const STEPS = { model: "fields-model", data: "fields-data", out: "fields-out" };
// Options on which the examples and the number of steps depend.
const OF_DATA = new Set(["model", "adapter", "data", "columns", "eval_data", "on_bad_line", "chat_template", "objective", "batch_size",
  "gradient_accumulation_steps", "max_length", "epochs", "max_steps", "packing", "loss_on", "eval_fraction", "seed"]);
const WIDE = new Set(["model", "data", "out"]);
const PARTS = [["weights", "weights"], ["adapter", "adapter"], ["gradients", "gradients"], ["optimizer", "optimizer"], ["activations", "activations"], ["dequantized", "dequantized weights"]];
const STATES = { running: "running", done: "done", stopped: "stopped", failed: "failed" };
const SPELLED = ["LoRA", "DoRA", "rsLoRA", "LR", "VRAM", "int8"];  // spelling within labels
const NEW_MODEL = "model:";  // begins values of the chat's list that name a model instead of a run

let about = null, state = null, server = null;
let draftNumber = 0, saving = false;
const fields = new Map();  // name -> { option, input, box, error }
const series = new Map(), compared = new Set(), logs = new Map();
let steps = null, fewSteps = "", planned = null;
let refused = null;  // options that Start was refused for, as JSON, while its message is shown
let chat = null, chatFor = "";
const charts = new Charts(place("charts"));

// Tell screen readers. Only this polite live region does so, so that they read nothing twice.
function announce(text) { setText(place("said"), text); }

// ---- fields, generated from the options of finetune ------------------------------------------------
// Label of an option.
function words(name) {
  const text = name.replaceAll("_", " ");
  return SPELLED.reduce((said, word) => said.replace(new RegExp(`\\b${word}\\b`, "i"), word), text[0].toUpperCase() + text.slice(1));
}

function sentence(text) { return text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : "."); }

// Build a field of an option: its label, input, help and error.
function makeField(option, idPrefix = "option-") {
  const id = `${idPrefix}${option.name}`, described = `${id}-help ${id}-error`;
  const common = { id, "aria-describedby": described, "aria-required": option.required || null };
  const name = el("span", { class: "name" }, el("label", { for: id }, words(option.name)), el("code", {}, option.flag));
  const help = el("p", { class: "help", id: `${id}-help` }, sentence(option.help));
  const error = el("p", { class: "error", id: `${id}-error`, hidden: true });
  let input;
  if (option.type === "bool" && !option.open) {
    input = el("input", { ...common, type: "checkbox", checked: option.default === "true" });
    name.prepend(input);
    name.className = "check";
  } else if (option.choices.length || option.open) {
    const choices = option.open ? ["true", "false"] : option.choices;
    const empty = option.default ? `default: ${option.default}` : "default";
    input = el("select", common, el("option", { value: "" }, empty), ...choices.map((c) => el("option", { value: c }, c === "true" ? "yes" : c === "false" ? "no" : c)));
  } else if (option.type === "lines") {
    input = el("textarea", { ...common, rows: "2", placeholder: option.required ? "one on each line" : "not set", spellcheck: "false" });
  } else {
    const numeric = option.type === "int" || option.type === "float" ? "decimal" : null;
    input = el("input", { ...common, type: "text", inputmode: numeric, placeholder: option.default || (option.required ? "" : "not set"), spellcheck: "false", autocomplete: "off" });
  }
  const box = el("div", { class: WIDE.has(option.name) ? "field wide" : "field" }, name, input.type === "checkbox" ? null : input, help, error);
  box.dataset.words = `${option.name} ${option.flag} ${words(option.name)} ${option.help}`.toLowerCase();
  if (option.path) completePaths(input, option, box);
  return { option, input, box, error };
}

// Complete paths by a list of the files in the folder that has been typed, which the browser shows.
function completePaths(input, option, box) {
  const list = el("datalist", { id: `${input.id}-paths` });
  if (input.tagName === "INPUT") input.setAttribute("list", list.id);
  box.append(list);
  let shown = null;
  input.addEventListener("input", async () => {
    const text = input.value.split("\n").at(-1), folder = text.slice(0, text.lastIndexOf("/") + 1);
    if (shown === folder && !text.endsWith("/")) return;
    shown = folder;
    const found = await ask("paths", { text: folder }).catch(() => []);
    list.replaceChildren(...found.map((path) => el("option", { value: path })));
  });
}

// Value of a field, or "" for the default.
function valueOf({ option, input }) {
  if (input.type === "checkbox") return input.checked === (option.default === "true") ? "" : input.checked;
  return option.type === "lines" ? input.value.split("\n").map((line) => line.trim()).filter(Boolean) : input.value.trim();
}

function setValue({ option, input }, value) {
  if (input.type === "checkbox") input.checked = value === undefined ? option.default === "true" : value === true || value === "true";
  else input.value = value === undefined ? "" : Array.isArray(value) ? value.join("\n") : String(value);
}

// Options that differ from their defaults.
function given() {
  const found = {};
  for (const [name, field] of fields) {
    const value = valueOf(field);
    if (value !== "" && !(Array.isArray(value) && !value.length)) found[name] = value;
  }
  return found;
}

function buildForm() {
  const groups = new Map();
  for (const option of about.options) {
    if (option.name === "resume") continue;
    const field = makeField(option);
    fields.set(option.name, field);
    const step = STEPS[option.name] ?? (about.usual.includes(option.name) ? "fields-usual" : null);
    if (step) { place(step).append(field.box); continue; }
    if (!groups.has(option.group)) groups.set(option.group, el("div", { class: "fields" }));
    groups.get(option.group).append(field.box);
  }
  for (const name of about.usual) if (fields.has(name)) place("fields-usual").append(fields.get(name).box);
  place("fields-more").replaceChildren(...[...groups].map(([group, box]) => el("fieldset", {}, el("legend", {}, group), box)));
  place("find").addEventListener("input", () => {
    const wanted = place("find").value.trim().toLowerCase();
    for (const box of place("fields-more").querySelectorAll(".field")) box.hidden = !box.dataset.words.includes(wanted);
    for (const set of place("fields-more").querySelectorAll("fieldset")) set.hidden = !set.querySelector(".field:not([hidden])");
  });
  // A path or a name on the Hub is looked up once it is complete: when the field loses focus, or on Enter.
  place("form").addEventListener("input", (event) => { if (event.target.id !== "find" && !isPath(event.target)) typed(); });
  place("form").addEventListener("change", (event) => { if (isPath(event.target)) typed(); });
  place("form").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault();  // only the button starts a run
    typed();
  });
  place("form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
  place("copy").addEventListener("click", async () => {
    await navigator.clipboard?.writeText(place("command").textContent);
    place("copy").textContent = "Copied";
    setTimeout(() => { place("copy").textContent = "Copy"; }, 1500);
  });
}

const isPath = (input) => Boolean([...fields.values()].find((field) => field.input === input)?.option.path);

// ---- results of the fields -----------------------------------------------------------------------------
// Runs the last of several requests, and aborts earlier ones. A request is not repeated for the same signature unless it fails.
class Latest {
  constructor() { this.controller = null; this.signature = null; }

  async run(signature, work) {
    if (signature === this.signature) return;
    this.signature = signature;
    this.controller?.abort();
    const controller = this.controller = new AbortController();
    try { await work(controller.signal); } catch (error) {
      if (error.name === "AbortError") return;
      if (controller === this.controller) this.signature = null;
      throw error;
    }
  }
}

const latest = { check: new Latest(), model: new Latest(), data: new Latest(), plan: new Latest() };
let typing = null;

function typed() {
  clearTimeout(typing);
  typing = setTimeout(() => { follow(); saveDraft(); }, TYPING);
}

async function saveDraft() {
  saving = true;
  try { draftNumber = (await ask("draft", { options: given() })).draft_number; } catch { /* poll() shows that the server does not answer */ }
  saving = false;
}

// Show an error at the field that it names, and clear all others.
function markError(error) {
  for (const [name, field] of fields) {
    const wrong = error?.param === name;
    field.error.hidden = !wrong;
    setText(field.error, wrong ? error.message : "");
    if (wrong) field.input.setAttribute("aria-invalid", "true"); else field.input.removeAttribute("aria-invalid");
  }
}

// Update everything that depends on the fields.
function follow() {
  const options = given(), all = JSON.stringify(options);
  const without = (...names) => JSON.stringify(Object.entries(options).filter(([name]) => !names.includes(name)));
  latest.check.run(all, async (signal) => {
    const found = await ask("check", { options }, signal);
    setText(place("command"), found.command);
    setText(place("yaml"), found.yaml || "(no YAML while an option is wrong)");
    if (all !== refused) {  // a check that began before Start was pressed must not hide why it was refused
      refused = null;
      markError(found.error);
      place("wrong").replaceChildren();
    }
    if (found.error) return;
    showModel(options);
    showData(options, JSON.stringify(Object.entries(options).filter(([name]) => OF_DATA.has(name))));
    showPlan(options, without("out", "data", "eval_data", "columns", "epochs", "max_steps"));
  }).catch((error) => { markError(error); });
}

function showModel(options) {
  latest.model.run(options.model ?? "", async (signal) => {
    const box = place("model");
    if (!options.model) { box.replaceChildren(); return; }
    box.replaceChildren(el("p", { class: "soft small" }, "Reading the model"));
    try {
      const found = await ask("model", { model: options.model }, signal);
      announce(`${found.architecture}, ${count(found.parameters)} parameters`);
      const facts = [["kind", found.architecture], ["parameters", count(found.parameters)], ["layers", found.layers],
        ["longest text", `${found.positions.toLocaleString("en")} tokens`], ["chat template", found.chat_template ? "yes" : "none"]];
      box.replaceChildren(el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))));
      if (!found.chat_template) box.append(el("p", { class: "help" }, "Conversations need a chat template: set one below, such as chatml."));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      announce(plain(error));
      box.replaceChildren(el("p", { class: "notice" }, plain(error)));
    }
  });
}

// Message without the option's name, which the field shows.
const plain = (error) => error.message.replace(/^--(model|data): /, "");
const count = (n) => (n >= 1e9 ? `${(n / 1e9).toPrecision(3)} billion` : n >= 1e6 ? `${(n / 1e6).toPrecision(3)} million` : n.toLocaleString("en"));

function showData(options, signature) {
  latest.data.run(signature, async (signal) => {
    const box = place("data");
    steps = null;
    fewSteps = "";
    if (!options.model || !options.data?.length) { box.replaceChildren(); showTime(); return; }
    box.replaceChildren(el("p", { class: "soft small" }, "Reading the data"));
    try {
      const found = await ask("data", { options }, signal);
      steps = found.steps;
      fewSteps = found.note.replace(/^note: /, "");
      announce(found.summary[0]);
      const example = ({ source, label, tokens, trained, pieces }) => el("article", { class: "example" },
        el("p", { class: "small soft" }, `${source}: ${label ? `${label}, ` : ""}${tokens} tokens, ${trained} ${found.counts}`),
        el("div", { class: "text", tabindex: "0" }, ...pieces.map(([text, learned]) =>
          (learned ? el("mark", {}, text) : el("span", { class: learned === null ? "gap" : "read" }, text)))));
      box.replaceChildren(
        el("p", { class: "small" }, el("mark", {}, "Marked text"), ` is ${found.counts}. All other text is only read.`),
        ...found.examples.map(example),
        el("details", {}, el("summary", { class: "small" }, found.summary[0]), ...found.summary.slice(1).map((line) => el("p", { class: "small soft" }, line.trim()))));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (place("model").textContent === plain(error)) { box.replaceChildren(); showTime(); return; }  // it is told there
      announce(plain(error));
      box.replaceChildren(el("p", { class: "notice" }, plain(error)));
    }
    showTime();
  });
}

const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);

function showPlan(options, signature) {
  latest.plan.run(signature, async (signal) => {
    const box = place("estimate");
    planned = null;
    if (!options.model) { box.replaceChildren(el("p", { class: "soft small" }, "Choose a model first.")); return; }
    box.setAttribute("aria-busy", "true");
    if (!box.querySelector(".figure")) box.replaceChildren(el("p", { class: "soft small" }, "Estimating"));
    try {
      planned = await ask("plan", { options }, signal);
      const whole = planned.limit_bytes || planned.peak_bytes;
      const bar = el("div", { class: "bar", "aria-hidden": "true" }, ...PARTS.map(([key], i) => {
        const part = el("i", { class: `f${i}` });
        part.style.width = `${100 * planned.bytes[key] / whole}%`;
        return part;
      }));
      announce(`Estimate: ${size(planned.peak_bytes)} of device memory`);
      const over = planned.limit_bytes && planned.peak_bytes > planned.limit_bytes;
      box.replaceChildren(
        el("div", {}, el("p", { class: over ? "figure bad" : "figure" }, size(planned.peak_bytes)),
          el("p", { class: "help" }, planned.limit_bytes ? `of ${size(planned.limit_bytes)} device memory` : "device memory at most")),
        bar,
        el("dl", { class: "parts" }, ...PARTS.flatMap(([key, name], i) => (planned.bytes[key] ? [el("dt", { class: `k${i}` }, name), el("dd", {}, size(planned.bytes[key]))] : []))),
        el("p", { id: "time" }), el("p", { class: "help", id: "few-steps" }), el("p", { class: "help" }, whereItRuns(planned)));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      box.replaceChildren(el("p", { class: "small soft" }, `No estimate: ${error.message}`), el("p", { id: "time" }), el("p", { class: "help", id: "few-steps" }));
    }
    box.removeAttribute("aria-busy");
    showTime();
  });
}

function whereItRuns({ device, run_device: runs }) {
  return runs === device ? device : `The run takes ${runs}, in main memory. The estimate is for a GPU.`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} seconds`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} minutes` : `${(minutes / 60).toFixed(1)} hours`;
}

function showTime() {
  const box = place("time");
  if (!box) return;
  setText(place("few-steps"), fewSteps && sentence(fewSteps));
  if (!steps) { setText(box, ""); return; }
  const speed = planned?.tokens_per_second;
  const told = speed ? `, about ${duration(steps * planned.tokens_per_step / speed)} at ${speed.toLocaleString("en")} tokens per second` : "";
  setText(box, `${steps} step${steps === 1 ? "" : "s"}${told}.${speed ? "" : " The time is known after the first steps."}`);
}

async function start() {
  place("start").disabled = true;
  const options = given();
  try {
    const { run } = await ask("start", { options });
    compared.clear();
    location.hash = addressOf(run);
    await poll();
    setValue(fields.get("out"), state.free);
    follow();
    saveDraft();
  } catch (error) {
    refused = JSON.stringify(options);
    markError(error);
    place("wrong").replaceChildren(el("p", { class: "notice" }, error.message));
    fields.get(error.param)?.box.closest("details")?.setAttribute("open", "");
    fields.get(error.param)?.input.focus();
  }
  place("start").disabled = false;
}

// ---- runs ---------------------------------------------------------------------------------------------
// Names that are not UTF-8 contain lone surrogates, which addresses cannot hold, so these are escaped as in JSON.
const addressOf = (run) => `run=${encodeURIComponent(JSON.stringify(run).slice(1, -1))}`;
const chosenRun = () => (location.hash.startsWith("#run=") ? JSON.parse(`"${decodeURIComponent(location.hash.slice(5))}"`) : null);
const seriesOf = (run) => { if (!series.has(run)) series.set(run, new Series()); return series.get(run); };

function shownRuns() {
  const chosen = chosenRun();
  return state.runs.filter((run) => run.run === chosen || compared.has(run.run))
    .map((run) => ({ ...run, series: seriesOf(run.run) }));
}

function drawList() {
  const chosen = chosenRun();
  const listed = state.runs.length, find = place("find-run").value.trim();
  setText(place("folder"), `in ${about.folder}${state.found > listed ? `: ${listed} of ${state.found}` : ""}`);
  place("find-run-field").hidden = !find && state.found <= FEW;
  const rows = state.runs.map(({ log_bytes, line, left, ...run }) => [run, compared.has(run.run)]);
  fill(place("list"), [rows, chosen, find], () => {
    if (!rows.length && find) return [el("p", { class: "soft" }, "No run has this in its name.")];
    if (!rows.length) return [el("p", { class: "soft" }, "There is no run yet. ", el("a", { href: "#new" }, "Start the first one"), ".")];
    const focused = document.activeElement?.dataset?.focus;
    const body = rows.map(([run, ticked]) => {
      const shown = run.run === chosen || ticked;
      const tick = el("input", { type: "checkbox", checked: shown, disabled: run.run === chosen, "aria-label": `Compare ${run.name}`, "data-focus": `tick ${run.run}` });
      tick.addEventListener("change", () => { if (tick.checked) compared.add(run.run); else compared.delete(run.run); draw(); });
      const open = el("button", { class: "plain", "data-focus": `open ${run.run}`, "aria-current": run.run === chosen ? "true" : null }, run.name);
      open.addEventListener("click", () => { location.hash = addressOf(run.run); });
      const dot = el("span", { class: shown ? color(run.number) : "hidden-text", "aria-hidden": "true" }, "● ");
      const cell = (name, text) => el("td", { class: "number", "data-name": name }, text);
      return el("tr", { class: run.run === chosen ? "chosen" : "" }, el("td", {}, tick), el("td", {}, dot, open),
        el("td", {}, el("span", { class: `state ${run.state}` }, STATES[run.state])),
        cell("step", run.step === null ? "–" : `${run.step}${run.steps ? ` of ${run.steps}` : ""}`),
        cell("loss", written(run.loss)), cell("held-out loss", written(run.held_out_loss)));
    });
    const head = ["", "run", "state", "step", "loss", "held-out loss"].map((text) => el("th", { scope: "col" }, text || el("span", { class: "hidden-text" }, "compare")));
    const table = el("table", { class: "list" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
    if (focused) queueMicrotask(() => [...place("list").querySelectorAll("[data-focus]")].find((e) => e.dataset.focus === focused)?.focus());
    return [table];
  });
}

function drawRun() {
  const run = state.runs.find((one) => one.run === chosenRun());
  for (const id of ["run", "output", "export"]) place(id).hidden = !run;
  if (!run) { place("longer").hidden = place("samples").hidden = place("profile").hidden = true; return; }
  const found = seriesOf(run.run), step = run.step ?? 0;
  setText(place("run-name"), run.name);
  place("run-state").className = `state ${run.state}`;
  setText(place("run-state"), STATES[run.state]);
  const total = Math.max(run.steps ?? 0, step);
  place("run-progress").hidden = !(run.state === "running" && total);
  place("run-progress").setAttribute("aria-valuemax", total);
  place("run-progress").setAttribute("aria-valuenow", step);
  place("run-progress").firstElementChild.style.width = `${total ? 100 * step / total : 0}%`;
  const left = run.left && run.left !== "0:00" && run.left !== "-:--" ? `, ${run.left} left` : "";
  const speech = {
    running: stopping.has(run.run) ? "Stopping after this step." : total ? `Step ${step} of ${total}${left}.` : run.line || "Starting.",
    done: step && run.loss === null ? "Done, but its last loss is not finite. Start again with a lower learning rate." : "Done. Its result can be exported, and you can chat with it.",
    stopped: run.resumes ? "Stopped. Everything up to the last checkpoint is kept." : "Stopped before its first checkpoint.",
    failed: "",
  }[run.state];
  setText(place("run-words"), speech);
  fill(place("run-notes"), [run.run, found.notes], () => found.notes.map((note) => el("p", { class: "error" }, note)));
  place("run-wrong").hidden = run.state !== "failed";
  setText(place("run-wrong"), run.state === "failed" ? run.reason : "");
  fill(place("run-buttons"), [run.run, run.state, run.resumes, run.adapter, run.model, stopping.has(run.run), Object.keys(found.options).length], () => {
    const button = (text, name, work, main = false) => {
      const made = el("button", { type: "button", class: main ? "main" : "" }, text);
      made.addEventListener("click", async () => {
        made.disabled = true;
        try { await work(); } catch (error) { place("run-wrong").hidden = false; setText(place("run-wrong"), error.message); }
        made.disabled = false;
        poll();
      });
      return made;
    };
    const made = [];
    if (run.state === "running")
      made.push(button(stopping.has(run.run) ? "Stop at once" : "Stop", "stop", async () => { await ask("stop", { run: run.run }); stopping.add(run.run); }));
    else stopping.delete(run.run);
    if (run.resumes && run.state !== "done") made.push(button("Resume", "resume", () => ask("resume", { run: run.run }), true));
    if (run.state !== "running" && (run.adapter || run.model)) made.push(button("Chat", "chat", () => openChat(run.run)));
    if (Object.keys(found.options).length) made.push(button("Use its options", "again", () => reuse(run.run)));
    return made;
  });
  drawSamples(found);
  place("profile").hidden = !found.profile;
  setText(place("profile").lastElementChild, found.profile ?? "");
  drawLonger(run);
  drawExport(run);
  const text = logs.get(run.run)?.text ?? "";
  if (place("text").textContent !== text) {
    place("text").textContent = text;
    place("text").scrollTop = place("text").scrollHeight;
  }
}

const stopping = new Set();  // runs that were asked to stop after a step

// Fill the form with the options in a run's config.yaml.
function reuse(run) {
  const options = seriesOf(run).options;
  for (const [name, field] of fields) {
    let value = options[name];
    if (value === "null" || value === undefined || name === "out" || name === "resume") value = undefined;
    else if (["lines", "list"].includes(field.option.type) && value.startsWith("[")) value = JSON.parse(value);
    if (Array.isArray(value) && field.option.type === "list") value = value.join(", ");
    if (value !== undefined && String(value) === field.option.default) value = undefined;
    setValue(field, Array.isArray(value) && !value.length ? undefined : value);
  }
  setValue(fields.get("out"), state.free);
  location.hash = "new";
  typed();
}

function drawSamples(found) {
  place("samples").hidden = !found.samples.length;
  fill(place("samples"), [found.have, chosenRun()], () => [el("h2", {}, "What the model writes"),
    ...found.samples.slice(-30).reverse().map(({ step, prompt, text }) => el("div", { class: "sample" },
      el("p", { class: "small soft" }, step ? `after step ${step}` : "before training"),
      el("p", { class: "said" }, el("span", { class: "read" }, prompt), el("span", {}, text ?? " (nothing)"))))]);
}

const told = (name, value) => (value === undefined ? "–" : name === "seconds" ? duration(Number(value)) : size(Number(value)));

// Show results of the compared runs, and options that differ between them.
function drawCompared() {
  const shown = shownRuns();
  place("compared").hidden = shown.length < 2;
  if (shown.length < 2) return;
  fill(place("compared"), shown.map((run) => [run.name, run.number, run.loss, run.series.options, run.series.results]), () => {
    const names = new Set(shown.flatMap((run) => Object.keys(run.series.options)));
    names.delete("out");
    const differing = [...names].map((name) => [name, shown.map((run) => run.series.options[name] ?? "–")]).filter(([, values]) => values.some((v) => v !== values[0]));
    const results = [["held-out loss", shown.map((run) => written(run.held_out_loss))], ["loss", shown.map((run) => written(run.loss))],
      ...["seconds", "peak_bytes"].filter((name) => shown.some((run) => run.series.results?.[name])).map((name) => [name === "seconds" ? "time" : "peak memory", shown.map((run) => told(name, run.series.results?.[name]))])];
    const row = ([name, values]) => el("tr", {}, el("th", { scope: "row" }, name), ...values.map((value) => el("td", {}, value)));
    return [el("h2", {}, "Compared"), el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, el("span", { class: "hidden-text" }, "option")), ...shown.map((run) => el("th", { scope: "col", class: color(run.number) }, run.name)))),
      el("tbody", {}, ...results.map(row), ...differing.map(row))))];
  });
}

// Offer to continue a finished run for more steps.
function drawLonger(run) {
  const box = place("longer"), had = seriesOf(run.run).options;
  box.hidden = !(run.state === "done" && run.resumes && Object.keys(had).length);
  if (!box.hidden) fill(box, [run.run, ...about.longer.map((name) => had[name])], () => [el("summary", {}, "Train longer"), longerForm(run, had)]);
}

function longerForm(run, had) {
  const options = about.options.filter((option) => about.longer.includes(option.name));
  const made = options.map((option) => makeField({ ...option, default: had[option.name]?.replace("null", "") ?? "" }, "longer-"));
  const wrong = el("p", { class: "error", role: "alert" });
  const form = el("form", { class: "stack" }, el("div", { class: "fields" }, ...made.map((field) => field.box)), wrong, el("div", { class: "row" }, el("button", { type: "submit" }, "Go on")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const options = Object.fromEntries(made.map((field) => [field.option.name, field.input.value.trim()]).filter(([, value]) => value));
    try { await ask("resume", { run: run.run, options }); wrong.textContent = ""; } catch (error) { wrong.textContent = error.message; }
    poll();
  });
  return form;
}

// ---- export -------------------------------------------------------------------------------------------
function drawExport(run) {
  const box = place("export"), ready = run.state !== "running" && run.adapter;
  box.hidden = !ready;
  if (!ready) return;
  if (box.dataset.run !== run.run) {
    box.dataset.run = run.run;
    const tool = el("select", { id: "export-tool" }, ...about.tools.map((name) => el("option", {}, name)));
    const made = about.export.map((option) => makeField({ ...option, help: option.help.replace(/^with [^:]+: /, "") }, "export-"));
    const ofOllama = () => made.filter(({ option }) => option.name === "create").forEach((field) => { field.box.hidden = tool.value !== "ollama"; });
    tool.addEventListener("change", ofOllama);
    ofOllama();
    const go = el("button", { type: "submit" }, "Export");
    const form = el("form", { class: "stack" }, el("div", { class: "fields" },
      el("div", { class: "field" }, el("span", { class: "name" }, el("label", { for: "export-tool" }, "For")), tool, el("p", { class: "help" }, "Format of the merged model.")),
      ...made.map((field) => field.box)), el("div", { class: "row" }, go));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const options = Object.fromEntries(made.map((field) => [field.option.name, valueOf(field)]).filter(([, value]) => value !== ""));
      try { await ask("export", { run: run.run, tool: tool.value, options }); setText(place("export-wrong"), ""); } catch (error) { setText(place("export-wrong"), error.message); }
      poll();
    });
    box.replaceChildren(el("details", {}, el("summary", {}, "Export"), form), el("p", { class: "error", id: "export-wrong", role: "alert" }), el("div", { id: "export-state", role: "status" }));
  }
  const found = state.export;
  if (found) fill(place("export-state"), found, () => [
    el("p", { class: "small" }, el("span", { class: `state ${found.state}` }, `export ${STATES[found.state]}`)),
    el("pre", { class: "block" }, `$ ${found.command}\n${found.lines.join("\n")}`)]);
}

// ---- chat ---------------------------------------------------------------------------------------------
async function openChat(run) {
  location.hash = "chat";
  await ask("chat/open", { run });
  poll();
}

function drawChat() {
  const found = state.chat, usable = state.runs.filter((run) => run.adapter || run.model);
  const model = fields.get("model")?.input.value.trim();
  fill(place("chat-model"), [usable.map((run) => run.run), model, found.run], () => [
    ...usable.map((run) => el("option", { value: run.run, selected: run.run === found.run }, run.name)),
    model ? el("option", { value: NEW_MODEL + model }, `${model} (no adapter)`) : null,
    ...(usable.length || model ? [] : [el("option", { value: "" }, "no model yet")])]);
  place("chat-form").querySelector("[type=submit]").disabled = found.state === "loading" || !place("chat-model").value;
  place("chat-close").disabled = found.state === "closed";
  const told = {
    closed: "Nothing is loaded. A loaded model takes device memory until you unload it.",
    loading: `Loading ${found.title}. ${found.line}`, ready: `${found.title} is loaded.`, failed: `The model could not be loaded: ${found.reason}`,
  }[found.state];
  setText(place("chat-words"), told);
  place("chat-words").className = found.state === "failed" ? "notice" : "soft";
  place("talk").hidden = found.state !== "ready";
  const name = found.state === "ready" ? found.id : "";
  if (name && name !== chatFor) {
    chatFor = name;
    fetchModels();
  }
  if (found.state === "closed") chatFor = "";
}

async function fetchModels() {
  const models = (await (await request("/v1/models")).json()).data.map((one) => one.id);
  chat = new Chat(place("talk"), models, models.slice(0, 2));
}

place("chat-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const value = place("chat-model").value;
  const asked = value.startsWith(NEW_MODEL) ? { model: value.slice(NEW_MODEL.length), device: fields.get("device").input.value } : { run: value };
  try { await ask("chat/open", asked); } catch (error) { setText(place("chat-words"), error.message); return; }
  poll();
});
place("chat-close").addEventListener("click", async () => { await ask("chat/close"); poll(); });

// ---- views and polling ------------------------------------------------------------------------------------
function showView() {
  const hash = location.hash.slice(1) || "new", name = hash.startsWith("run=") ? "runs" : ["runs", "chat"].includes(hash) ? hash : "new";
  for (const view of ["new", "runs", "chat"]) place(`view-${view}`).hidden = view !== name;
  for (const link of document.querySelectorAll(".top nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  document.title = `${{ new: "New run", runs: "Runs", chat: "Chat" }[name]} – wgrad studio`;
  if (state) draw();
}

function draw() {
  drawList();
  drawRun();
  const shown = shownRuns();
  place("look").hidden = !shown.some((run) => run.series.keys.size);
  if (!place("view-runs").hidden) charts.draw(shown, { log: place("log").checked, smoothing: Number(place("smoothing").value) });
  drawCompared();
  drawChat();
}

let polling = null, pollAgain = false;

// Ask for the state now, and then regularly. A call during a request makes another one follow it.
function poll() {
  if (polling) { pollAgain = true; return polling; }
  clearTimeout(timer);
  polling = askState().finally(() => {
    polling = null;
    if (pollAgain) { pollAgain = false; return poll(); }
    return null;
  });
  return polling;
}

let timer = null;

async function askState() {
  let wait = EVERY;
  try {
    const chosen = chosenRun();
    const wanted = state ? state.runs.map((run) => run.run).filter((run) => run === chosen || compared.has(run)) : [];
    const have = Object.fromEntries(wanted.map((run) => [run, seriesOf(run).have]));
    const find = place("view-runs").hidden ? "" : place("find-run").value.trim();
    const found = await ask("state", { have, find, logs: chosen ? { [chosen]: logs.get(chosen)?.size ?? -1 } : {} });
    if (server !== null && server !== found.server) { series.clear(); logs.clear(); draftNumber = 0; saveDraft(); }
    server = found.server;
    for (const [run, news] of Object.entries(found.news)) if (seriesOf(run).take(news)) wait = 0;
    for (const [run, log] of Object.entries(found.logs)) logs.set(run, log);
    const first = state === null, ended = first ? [] : state.runs.map((run) => [run.run, run.state]);
    state = found;
    if (first && chosen) wait = 0;
    const before = new Map(ended);
    for (const run of found.runs) if (before.has(run.run) && before.get(run.run) !== run.state) announce(`${run.name}: ${STATES[run.state]}. ${run.reason}`);
    if (!saving && found.draft_number > draftNumber) {
      draftNumber = found.draft_number;
      for (const [name, field] of fields) if (field.input !== document.activeElement) setValue(field, found.draft[name]);
      follow();
    }
    if (first && !fields.get("out").input.value) { setValue(fields.get("out"), state.free); follow(); }
    const going = found.runs.filter((run) => run.state === "running").length;
    setText(place("status"), going ? `${going} run${going === 1 ? "" : "s"} in progress` : "Ready");
    place("status").classList.remove("bad");
    draw();
    document.body.dataset.answers = Number(document.body.dataset.answers ?? 0) + 1;
  } catch (error) {
    wait = AGAIN;
    setText(place("status"), error.status ? error.message : "No answer from wgrad studio. The page shows the last known state.");
    place("status").classList.add("bad");
  }
  clearTimeout(timer);
  timer = setTimeout(poll, wait);
}

place("find-run").addEventListener("input", () => poll());
addEventListener("hashchange", () => { showView(); place("main").focus({ preventScroll: true }); scrollTo(0, 0); poll(); });
for (const id of ["log", "smoothing"]) place(id).addEventListener("input", () => draw());

about = await ask("about");
buildForm();
showView();
follow();
poll();
