// A conversation with one model or several next to each other, through the OpenAI API of the same server.
"use strict";

import { el, request } from "/pages/page.js";

const TURNS = "conversation", TEXT = "text to continue";

export class Chat {
  // where: element to fill. models: names in the API. chosen: those that answer at first.
  constructor(where, models, chosen = models) {
    this.where = where;
    this.histories = new Map(models.map((name) => [name, []]));
    this.chosen = new Set(chosen);
    this.stopper = null;
    this.build(models);
  }

  build(models) {
    this.models = el("div", { class: "chat-models", role: "group", "aria-label": "Models that answer" },
      el("span", { class: "soft small" }, models.length > 1 ? "Answers from" : "Answers from "),
      ...models.map((name) => el("label", {},
        el("input", {
          type: "checkbox", checked: this.chosen.has(name),
          onchange: (event) => { if (event.target.checked) this.chosen.add(name); else this.chosen.delete(name); },
        }), el("bdi", {}, name))));
    this.talk = el("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: "0", "aria-live": "off" },
      el("p", { class: "soft" }, "Say something. Each chosen model answers by itself."));
    this.input = el("textarea", {
      id: "message", rows: "3", placeholder: "Your message",
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
      },
    });
    this.sendButton = el("button", { class: "main", type: "submit" }, "Send");
    this.clearButton = el("button", { type: "button", onclick: () => this.clear() }, "Start over");
    this.status = el("p", { class: "hidden-text", role: "status" });
    const number = (name, label, value, step, min, max) => {
      this[name] = el("input", { type: "number", id: `chat-${name}`, value, step, min, max });
      return el("div", { class: "field" }, el("label", { for: `chat-${name}` }, label), this[name]);
    };
    this.mode = el("select", { id: "chat-mode" }, el("option", {}, TURNS), el("option", {}, TEXT));
    this.settings = el("details", {}, el("summary", { class: "small" }, "Settings"), el("div", { class: "settings" },
      el("div", { class: "field" }, el("label", { for: "chat-mode" }, "Write"), this.mode),
      number("temperature", "Temperature", "0.7", "0.1", "0", "2"),
      number("tokens", "Longest answer", "256", "1", "1", "100000")));
    const form = el("form", { class: "compose", onsubmit: (event) => { event.preventDefault(); this.send(); } },
      el("label", { for: "message", class: "hidden-text" }, "Your message"), this.input,
      el("div", { class: "row" }, el("span", { class: "help" }, "Enter sends, Shift+Enter makes a new line."),
        el("span", { class: "row" }, this.clearButton, this.sendButton)),
      this.settings);
    this.where.replaceChildren(el("div", { class: "chat" }, this.models, this.talk, form, this.status));
  }

  clear() {
    this.stopper?.abort();
    for (const name of this.histories.keys()) this.histories.set(name, []);
    this.talk.replaceChildren(el("p", { class: "soft" }, "Say something. Each chosen model answers by itself."));
    this.input.focus();
  }

  // Send the message to the chosen models. While they answer, the same button stops them.
  async send() {
    if (this.stopper) { this.stopper.abort(); return; }
    const text = this.input.value, names = [...this.histories.keys()].filter((name) => this.chosen.has(name));
    if (!text.trim()) return;
    if (!names.length) { this.say("Choose a model that answers."); return; }
    this.input.value = "";
    this.stopper = new AbortController();
    this.sendButton.textContent = "Stop";
    if (!this.talk.querySelector(".turn")) this.talk.replaceChildren();
    const answers = el("div", { class: "answers" });
    this.talk.append(el("div", { class: "turn user" }, text), answers);
    this.say("Waiting for the answer.");
    const done = await Promise.all(names.map((name) => this.answer(name, text, answers, this.stopper.signal)));
    this.stopper = null;
    this.sendButton.textContent = "Send";
    this.say(names.map((name, i) => `${name}: ${done[i]}`).join("\n"));
  }

  // Tell a screen reader.
  say(text) { this.status.textContent = text; }

  // Stream one model's answer into a new box, and return a text for screen readers.
  async answer(name, text, answers, signal) {
    const said = el("div", { class: "said" }), thought = el("div", { class: "said" });
    const thoughts = el("details", { hidden: true }, el("summary", {}, "Thoughts"), thought);
    const box = el("article", { class: "answer" }, el("h3", {}, el("bdi", {}, name)), thoughts, said);
    answers.append(box);
    const turns = this.mode.value === TURNS, history = this.histories.get(name);
    const messages = [...history, { role: "user", content: text }];
    const asked = {
      model: name, stream: true, temperature: Number(this.temperature.value), max_tokens: Number(this.tokens.value),
      ...(turns ? { messages } : { prompt: text }),
    };
    const take = (delta) => {
      const atEnd = this.talk.scrollTop + this.talk.clientHeight > this.talk.scrollHeight - 60;
      if (delta.reasoning_content) { thoughts.hidden = false; thought.append(delta.reasoning_content); }
      if (delta.content ?? delta.text) said.append(delta.content ?? delta.text);
      if (delta.tool_calls) said.append(JSON.stringify(delta.tool_calls));
      if (atEnd) this.talk.scrollTop = this.talk.scrollHeight;
    };
    try {
      await stream(turns ? "/v1/chat/completions" : "/v1/completions", asked, signal, take);
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (/no chat template/.test(error.message)) {
        this.settings.open = true;
        box.append(el("p", { class: "error" }, `It has no chat template, so it cannot hold a conversation. It can go on with a text: choose “${TEXT}” in the settings.`));
        return "It has no chat template.";
      }
      box.append(el("p", { class: stopped ? "help" : "error" }, stopped ? "Stopped." : error.message));
      if (!stopped) return error.message;
    }
    // "Start over" replaces the history, and an answer that it aborts must not restore the old one.
    if (turns && this.histories.get(name) === history) this.histories.set(name, [...messages, { role: "assistant", content: said.textContent }]);
    return said.textContent || "an empty answer";
  }
}

// Send a request, and call `take` with the delta of each server-sent event.
async function stream(path, asked, signal, take) {
  const answer = await request(path, { method: "POST", body: JSON.stringify(asked), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer ended too early: the model's process may have stopped");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      for (const choice of found.choices ?? []) take(choice.delta ?? choice);
    }
  }
}
