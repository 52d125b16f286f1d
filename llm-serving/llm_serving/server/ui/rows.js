// The requests, each a row that moves from one group to the next; its track shows what it has been doing.

import { clientId, colour, count, duration, el, plural, roughly, say, sharp } from "./dom.js";

export const GROUPS = [
  ["queue", "Queue", "have never run; at the right the steps each has waited, of so many at most", 6],
  ["preempted", "Preempted", "lost their place and wait to go on", 6],
  ["prefill", "Prefill", "their prompts are computed", 8],
  ["decode", "Decode", "a token a step", 20],
  ["paused", "Paused", "wait for other beams of their search", 8],
  ["ended", "Ended", "just now", 6],
];
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Rows {
  constructor() {
    this.rows = new Map();
    this.groups = new Map();
    this.node = el("div", { class: "groups" });
    for (const [phase, title, meaning, most] of GROUPS) {
      const number = el("span", { class: "count" }, "0");
      const list = el("ul", { class: "requests", "aria-label": title });
      const more = el("p", { class: "more" });
      const node = el("section", { class: "group", "data-phase": phase }, el("h3", {}, el("i", { class: `mark ${phase}` }), title, number, el("small", {}, meaning)), list, more);
      this.groups.set(phase, { node, list, number, more, most });
      this.node.append(node);
    }
  }

  draw(state) {
    const before = calm.matches ? null : this.#places();
    const shown = new Set();
    const totals = state.picture.replicas.reduce((sum, each) => [sum[0] + each.running, sum[1] + each.waiting], [0, 0]);
    for (const [phase, { node, list, number, more, most }] of this.groups) {
      const requests = state.inPhase(phase);
      const rows = requests.slice(0, most).map((request) => {
        shown.add(request.id);
        return this.#row(request, state.now);
      });
      list.replaceChildren(...rows.map((row) => row.node));
      say(number, count(requests.length));
      say(more, requests.length > most ? `and ${count(requests.length - most)} more` : "");
      node.hidden = !requests.length && ["preempted", "paused", "ended"].includes(phase);
      node.classList.toggle("empty", !requests.length);
    }
    for (const id of this.rows.keys()) if (!shown.has(id)) this.rows.delete(id);
    if (before) this.#move(before);
    const own = [...state.requests.values()].filter((each) => each.phase !== "ended").length;
    return Math.max(0, totals[0] + totals[1] - own);
  }

  /** Draws the tracks alone: what can be seen to move between two pictures. */
  drawTracks(now, span) {
    for (const row of this.rows.values()) row.drawTrack(now, span);
  }

  #row(request, now) {
    let row = this.rows.get(request.id);
    if (!row) {
      row = new Row(request);
      this.rows.set(request.id, row);
    }
    row.draw(request, now);
    return row;
  }

  #places() {
    return new Map([...this.rows].map(([id, row]) => [id, row.node.getBoundingClientRect().top]));
  }

  /** Lets each row that stands elsewhere now go there from where it was. */
  #move(before) {
    for (const [id, row] of this.rows) {
      const from = before.get(id);
      const by = from === undefined ? 0 : from - row.node.getBoundingClientRect().top;
      if (Math.abs(by) > 4 && Math.abs(by) < 1500) {
        row.node.animate([{ transform: `translateY(${by}px)` }, { transform: "none" }], { duration: 220, easing: "ease-out" });
      }
    }
  }
}

class Row {
  constructor(request) {
    const name = clientId(request.id);
    this.link = el("a", { href: `#/why/${encodeURIComponent(request.id)}`, class: "name", title: `${request.id}: why does it wait?` }, name);
    this.who = el("span", { class: "who" });
    this.canvas = el("canvas", { class: "track", "aria-hidden": "true" });
    this.cached = el("i", { class: "cached" });
    this.prompt = el("i", { class: "prompt" });
    this.output = el("i", { class: "output" });
    this.tokens = el("span", { class: "number tokens-of" });
    this.blocks = el("span", { class: "number blocks-of" });
    this.wait = el("span", { class: "number wait-of" });
    this.node = el("li", { class: "request" }, this.link, this.who, this.canvas,
      el("span", { class: "filled", "aria-hidden": "true" }, this.cached, this.prompt, this.output), this.tokens, this.blocks, this.wait);
  }

  draw(request, now) {
    this.request = request;
    const { row, phase } = request;
    this.node.dataset.phase = phase;
    say(this.who, row.tenant ? `${row.request_class} · ${row.tenant}` : row.request_class);
    const known = row.tokens ?? row.prompt + (row.output ?? 0);
    const output = phase === "ended" ? row.output : Math.max(0, known - row.prompt);
    const most = Math.max(row.most ?? known, known, 1);
    const computed = phase === "prefill" ? Math.min(row.computed, row.prompt) : phase === "queue" ? 0 : row.prompt;
    const cached = Math.min(row.cached ?? 0, computed);
    this.cached.style.width = `${(100 * cached) / most}%`;
    this.prompt.style.width = `${(100 * (computed - cached)) / most}%`;
    this.output.style.width = `${(100 * output) / most}%`;
    say(this.tokens, phase === "queue" ? `${count(row.prompt)}` : `${count(row.prompt)} + ${count(output)}`);
    this.tokens.title = `${plural(row.prompt, "token")} of prompt, ${count(cached)} of them found computed; ${count(output)} generated`;
    const holds = ["prefill", "decode", "paused"].includes(phase);
    say(this.blocks, holds ? (row.shared ? `${count(row.blocks)} ▪ ${count(row.shared)}` : count(row.blocks)) : "");
    this.blocks.title = holds ? `${plural(row.blocks, "block")}, of which others hold ${count(row.shared)} as well` : "";
    say(this.wait, waiting(request, now));
    this.wait.title = row.bound && phase === "queue" ? `waits ${count(row.waited)} steps; at most ${count(row.bound)}, whatever others send` : "";
  }

  drawTrack(now, span) {
    const { context, width, height } = sharp(this.canvas);
    const x = (time) => width - ((now - time) / span) * width;
    const { track } = this.request;
    track.forEach(([time, phase], index) => {
      const end = track[index + 1]?.[0] ?? now;
      if (phase === "ended" || end < now - span) return;
      context.fillStyle = colour(phase);
      const left = Math.max(0, x(time));
      const thick = phase === "queue" || phase === "preempted" ? height * 0.34 : height * 0.8;
      context.fillRect(left, (height - thick) / 2, Math.max(1.5, x(end) - left), thick);
    });
  }
}

/** How long it waits or takes: of the queue beside its bound, in steps. */
function waiting({ phase, row, since, arrived }, now) {
  if (phase === "ended") return `${row.reason} ${duration(1000 * row.seconds)}`;
  if (phase === "queue" && row.tenant_limit) return "tenant's limit";
  if (phase === "queue" && row.bound) return `${roughly(row.waited)} of ≤ ${roughly(row.bound)}`;
  if (phase === "preempted") return `${duration(1000 * (now - since))} lost ×${row.preemptions}`;
  return `${duration(1000 * (now - arrived))}${row.preemptions ? ` ×${row.preemptions}` : ""}`;
}
