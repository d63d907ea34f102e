// Shared by the studio, `wgrad watch` and the chat page: elements whose texts are never markup, and questions to the server.
"use strict";

export const place = (id) => document.getElementById(id);

// Children are elements or texts. Properties: class, attributes by name, and on...: listeners.
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Replace what a place shows, unless it shows that already: what is read or selected there stays.
export function fill(where, signature, make) {
  const text = JSON.stringify(signature) ?? "";
  if (where.dataset.signature === text) return false;
  where.dataset.signature = text;
  where.replaceChildren(...make().filter((child) => child !== null && child !== undefined));
  return true;
}

export function setText(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

const KEY = "wgrad-key";
let asking = null;

export const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

export class Refused extends Error {
  constructor(error, status) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.param = error?.param ?? null;
    this.status = status;
  }
}

// A question; where the server wants a key, the person is asked for it and the question is repeated.
export async function request(path, options = {}) {
  for (;;) {
    const answer = await fetch(path, { cache: "no-store", ...options, headers: headers() });
    if (answer.ok) return answer;
    const found = await answer.json().catch(() => null);
    if (answer.status !== 401) throw new Refused(found?.error, answer.status);
    await askForKey();
  }
}

export async function ask(name, body = {}, signal = undefined) {
  const answer = await request(`/api/${name}`, { method: "POST", body: JSON.stringify(body), signal });
  return answer.json();
}

function askForKey() {
  asking ??= new Promise((resolve) => {
    const input = el("input", { type: "password", id: "key", autocomplete: "off", required: true });
    const done = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.remove();
      asking = null;
      resolve();
    };
    const form = el("form", { class: "stack", onsubmit: done },
      el("h2", {}, "This server needs its key"),
      el("label", { for: "key" }, "Key"), input,
      el("p", { class: "help" }, "It is kept in this tab only."),
      el("button", { class: "main" }, "Continue"));
    const dialog = el("dialog", { oncancel: (event) => event.preventDefault() }, form);
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
