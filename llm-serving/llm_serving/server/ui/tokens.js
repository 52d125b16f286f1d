// The tokens of an answer, coloured by how likely each was, with what else might have stood there.

import { el, say } from "./dom.js";

const tip = el("div", { class: "tip", role: "tooltip", id: "token-tip", hidden: true });
document.body.append(tip);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});
document.addEventListener("scroll", () => (tip.hidden = true), { passive: true, capture: true });

/** What can be seen of a token: spaces and ends of lines get a sign. */
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

/** Of the likeliest tokens and the chosen one, each once, the likeliest first. */
function alternatives(token) {
  const rows = token.top.some((each) => each.text === token.text) ? [...token.top] : [token, ...token.top];
  return rows.sort((a, b) => b.logprob - a.logprob);
}

function show(token, node) {
  const rows = alternatives(token).map((each) => {
    const bar = el("i", {});
    bar.style.width = `${Math.max(1, 100 * Math.exp(each.logprob))}%`;
    return el(
      "li",
      { class: each.text === token.text ? "chosen" : "" },
      el("code", {}, visible(each.text)),
      el("span", { class: "bar" }, bar),
      el("span", { class: "number" }, percent(each.logprob)),
    );
  });
  tip.replaceChildren(
    el("p", {}, el("code", {}, visible(token.text)), ` ${percent(token.logprob)}`, el("small", {}, ` logprob ${token.logprob.toFixed(3)}`)),
    el("ol", {}, rows),
  );
  tip.hidden = false;
  const at = node.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const below = at.bottom + 8 + height < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, window.innerWidth - width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - height - 8)}px`;
}

export class TokenView {
  constructor() {
    this.tokens = [];
    this.node = el("div", { class: "tokens", role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
    this.node.addEventListener("pointerover", (event) => this.#point(event.target));
    this.node.addEventListener("pointerleave", () => (tip.hidden = true));
    this.node.addEventListener("focusin", (event) => this.#point(event.target));
    this.node.addEventListener("focusout", () => (tip.hidden = true));
    this.node.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Adds tokens: {text, logprob, top: [{text, logprob}]}. */
  add(tokens) {
    const spans = tokens.map((token) => {
      const first = this.tokens.length === 0;
      this.tokens.push(token);
      const span = el("span", { class: "token", tabIndex: first ? 0 : -1, "aria-describedby": "token-tip" });
      span.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
      say(span, token.text.replaceAll("\n", "↵\n") || "∅");
      return span;
    });
    this.node.append(...spans);
  }

  #point(target) {
    const index = [...this.node.children].indexOf(target);
    if (index >= 0) show(this.tokens[index], target);
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    const nodes = this.node.children;
    const at = [...nodes].indexOf(document.activeElement);
    if (step === undefined || at < 0) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(nodes.length - 1, at + step));
    nodes[at].tabIndex = -1;
    nodes[next].tabIndex = 0;
    nodes[next].focus();
  }
}
