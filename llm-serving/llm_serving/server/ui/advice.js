// What another value of a key would have made of the last minutes; asked for by a button, as it takes a minute.

import { askJson } from "./api.js";
import { count, el, plural, say } from "./dom.js";

export class AdvicePanel {
  constructor() {
    this.button = el("button", { type: "button", id: "advice", on: { click: () => this.#ask() } }, "Play the last 5 minutes under other values");
    this.message = el("p", { class: "more", role: "status" });
    this.list = el("ul", { class: "advice", "aria-label": "Advice" });
    this.node = el("div", {}, el("p", {}, this.button), this.message, this.list);
  }

  async #ask() {
    this.button.disabled = true;
    this.list.replaceChildren();
    say(this.message, "Playing; this takes up to four minutes. The server goes on meanwhile.");
    try {
      this.#draw(await askJson("v1/scheduler/advice?minutes=5"));
    } catch (error) {
      say(this.message, error.message);
    } finally {
      this.button.disabled = false;
    }
  }

  #draw(advice) {
    const found = [...advice.advised, ...advice.otherwise];
    const played = `${plural(advice.requests, "request")}, ${count(advice.played)} other values played`;
    say(this.message, found.length ? `${played}:` : `${played}: none would have been better.`);
    this.list.replaceChildren(...found.map((each) => el("li", {},
      el("code", {}, each.line), ` is ${each.was} (${each.source})${each.needs_restart ? "; takes a restart" : ""}`,
      el("p", { class: "aside" }, [...each.better.map(changed("better")), ...each.worse.map(changed("worse"))].join("; ")))));
  }
}

const changed = (word) => ({ figure, was, would_be: would }) => `${word}: ${figure} ${was} → ${would}`;
