// Panel that shows how another value of a configuration key would have changed the figures of the last minutes. The
// server simulates this for minutes, so only a button starts it.

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
    say(this.message, "Simulating; this takes up to four minutes. The server serves requests meanwhile.");
    try {
      this.#draw(await askJson("v1/scheduler/advice?minutes=5"));
    } catch (error) {
      say(this.message, error.message);
    } finally {
      this.button.disabled = false;
    }
  }

  #draw(advice) {
    const played = `${plural(advice.requests, "request")}, ${count(advice.played)} other values played`;
    const { advised, otherwise } = advice;
    const left = advice.not_played ? `; no time for ${count(advice.not_played)} more` : "";
    say(this.message, `${played}${left}. ${advised.length ? "Better in something and worse in nothing would have been:" : "None would have been better in something and worse in nothing."}`);
    const others = otherwise.length ? el("li", {}, el("details", {}, el("summary", {}, `${plural(otherwise.length, "value")} better in something and worse in something else`), el("ul", { class: "advice" }, otherwise.map(neighbour)))) : "";
    this.list.replaceChildren(...advised.map(neighbour), others);
  }
}

/** A key with another value: its line for the YAML, what it is now, and the figures that would have changed. */
function neighbour(each) {
  const file = each.source.split("/").at(-1);
  return el("li", {},
    el("code", {}, each.line), el("span", { class: "now", title: each.source }, ` in place of ${each.was} (${file})${each.needs_restart ? "; takes a restart" : ""}`),
    el("table", {}, el("thead", {}, el("tr", {}, ["figure", "was", "would be", ""].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ["better", "worse"].flatMap((word) => each[word].map(({ figure, was, would_be: would }) => el("tr", {},
        el("th", { scope: "row" }, figure), el("td", {}, was), el("td", {}, would), el("td", { class: word }, word)))))));
}
