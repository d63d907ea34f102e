// The chat page of `wgrad serve`. At first, two models answer.
"use strict";

import { Chat } from "/pages/chat.js";
import { el, place, request } from "/pages/page.js";

try {
  const models = (await (await request("/v1/models")).json()).data.map((model) => model.id);
  new Chat(place("chat"), models, models.slice(0, 2));
} catch (error) {
  place("chat").replaceChildren(el("p", { class: "notice", role: "alert" }, error.message));
}
