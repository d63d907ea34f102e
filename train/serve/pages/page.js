// Shared by the studio, `wgrad watch` and the chat page: building elements without HTML injection, and requests to the server.
"use strict";

export const place = (id) => document.getElementById(id);

// Create an element. properties: attributes by name (true sets an empty one; false, null and undefined set none), and listeners
// by names such as onclick. children: elements, or texts, which are never parsed as HTML.
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

// Replace the children of an element unless the signature is unchanged, so that selection and scrolling are kept. Return whether
// they were replaced.
export function fill(where, signature, make) {
  const text = JSON.stringify(signature) ?? "";
  if (where.dataset.signature === text) return false;
  where.dataset.signature = text;
  where.replaceChildren(...make().filter((child) => child !== null && child !== undefined));
  return true;
}

// Set a text unless it is unchanged, so that screen readers do not repeat it.
export function setText(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

const KEY = "wgrad-key";
let asking = null;

export const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

// An error that the server answered with. param: name of the wrong option, or null.
export class Refused extends Error {
  constructor(error, status) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.param = error?.param ?? null;
    this.status = status;
  }
}

// Send a request. If the server requires a key, ask the user for it and repeat the request.
export async function request(path, options = {}) {
  for (;;) {
    const answer = await fetch(path, { cache: "no-store", ...options, headers: headers() });
    if (answer.ok) return answer;
    const found = await answer.json().catch(() => null);
    if (answer.status !== 401) throw new Refused(found?.error, answer.status);
    await askForKey();
  }
}

// Call a function of the studio's API, and return its answer.
export async function ask(name, body = {}, signal = undefined) {
  const answer = await request(`/api/${name}`, { method: "POST", body: JSON.stringify(body), signal });
  return answer.json();
}

// Show one dialog for the key, however many requests wait for it.
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
