// Where the time of a request went: its parts as one bar, what it was promised, and the steps around it.

import { askJson } from "./api.js";
import { clientId, count, duration, el, plural, say } from "./dom.js";
import { COLOUR_OF, Timeline } from "./timeline.js";

const AGAIN_MS = 1000;

export class Why {
  static path = "why";
  static title = "Why did I wait?";

  constructor() {
    this.id = "";
    this.input = el("input", { id: "why-id", autocomplete: "off", spellcheck: false, placeholder: "page-… or chatcmpl-…" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.answers = el("div", { class: "answers", "aria-live": "polite" });
    this.timeline = new Timeline();
    this.node = el("div", { class: "why" },
      el("h1", {}, "Why did I wait?"),
      el("form", { class: "row ask", on: { submit: (event) => { event.preventDefault(); this.#go(); } } },
        el("label", { for: "why-id" }, "Request"), this.input, el("button", { class: "main", type: "submit" }, "Explain")),
      this.error, this.answers, this.timeline.node);
    document.addEventListener("key-changed", () => this.node.isConnected && this.show(this.id));
    document.addEventListener("theme-changed", () => this.node.isConnected && this.timeline.draw());
  }

  show(id) {
    clearTimeout(this.timer);
    if (id !== this.id) this.answers.replaceChildren();
    this.id = this.input.value = id;
    if (id) this.#load(true);
    else this.timeline.load([]);
  }

  hide() {
    clearTimeout(this.timer);
  }

  #go() {
    const address = `#/why/${encodeURIComponent(this.input.value.trim())}`;
    if (location.hash === address) this.show(this.input.value.trim());
    else location.hash = address;
  }

  async #load(first) {
    const { id } = this;
    try {
      const { requests } = await askJson(`v1/requests/${encodeURIComponent(id)}/explain`);
      if (id !== this.id) return;
      this.error.hidden = true;
      this.answers.replaceChildren(...requests.map(explained));
      const over = requests.every((each) => each.status === "finished");
      if (first || over) this.timeline.load(requests.map((each) => each.id));
      if (!over && this.node.isConnected) this.timer = setTimeout(() => this.#load(false), AGAIN_MS);
    } catch (error) {
      if (id !== this.id) return;
      this.error.hidden = false;
      say(this.error, error.message);
    }
  }
}

function explained(told) {
  const { parts, wall_ms: wall } = told;
  const bar = el("div", { class: "parts", role: "img", "aria-label": parts.map((part) => `${part.what} ${duration(part.ms)}`).join(", ") });
  const rows = parts.map((part) => {
    const piece = el("span", { title: `${part.what}${part.detail ? `, ${part.detail}` : ""}: ${duration(part.ms)}` });
    piece.style.flexGrow = Math.max(part.ms, 0.001);
    piece.style.background = `var(--${COLOUR_OF[part.what] ?? "queue"})`;
    bar.append(piece);
    const mark = el("i", { class: "mark" });
    mark.style.background = piece.style.background;
    return el("tr", {}, el("th", { scope: "row" }, mark, " ", part.what), el("td", { class: "detail" }, part.detail), el("td", { class: "number" }, duration(part.ms)),
      el("td", { class: "number" }, wall ? `${((100 * part.ms) / wall).toFixed(1)} %` : "–"), el("td", { class: "number" }, part.steps ? count(part.steps) : ""));
  });
  const { tokens, bounds, first_token: first, steps } = told;
  const ended = told.finish_reason ? `ended: ${told.finish_reason}` : told.status;
  return el("section", { class: "card explained", "aria-label": told.id },
    el("h2", {}, el("code", {}, clientId(told.id)), el("span", { class: "aside" }, `${told.request_class}${told.tenant ? ` · ${told.tenant}` : ""} · ${ended}`)),
    el("p", { class: "wall" }, el("strong", {}, duration(wall)), ` for ${plural(tokens.prompt, "prompt token")} (${count(tokens.cached)} found computed) and ${plural(tokens.output, "token")} of output`,
      steps.first === null ? "" : `, in steps ${count(steps.first)} to ${count(steps.last)}`),
    bar,
    el("div", { class: "scroll" }, el("table", {}, el("caption", { class: "unseen" }, "Parts of its time"), el("thead", {}, el("tr", {}, ["what", "why", "time", "share", "steps"].map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows))),
    el("dl", { class: "promises" },
      promise("Waited to be admitted", bounds.wait, "steps", bounds.wait_bound_s === null ? "" : `about ${duration(1000 * bounds.wait_bound_s)}`),
      promise("Left out between two tokens", bounds.decode_gap, "steps in a row", ""),
      promise("Lost its place", bounds.preemptions, "times", ""),
      el("div", {}, el("dt", {}, "First token"), el("dd", {}, first.real_ms === null ? "none yet" : duration(first.real_ms), first.predicted_ms === null ? "" : el("small", {}, ` predicted ${duration(first.predicted_ms)}`)))));
}

/** What was met beside what is promised. */
function promise(title, { bound, met }, unit, note) {
  const gauge = el("span", { class: "bar" }, el("i"));
  gauge.firstChild.style.width = bound ? `${Math.min(100, (100 * (met ?? 0)) / bound)}%` : "0";
  return el("div", {}, el("dt", {}, title), el("dd", {}, met === null ? "–" : count(met), el("small", {}, bound === null ? " nothing is promised" : ` of at most ${count(bound)} ${unit}${note ? `, ${note}` : ""}`)), gauge);
}
