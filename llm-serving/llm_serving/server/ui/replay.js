// A recording, decision after decision: who was computed, who was left out, who waited and what for.

import { clientId, colour, count, duration, el, plural, say, sharp } from "./dom.js";
import { setUpTheme } from "./theme.js";

const REQUEST = ["id", "class", "tenant", "prompt", "most", "arrival"];
const STEP = ["number", "time", "rows", "running", "waiting", "numWaiting", "preempted", "next", "reason", "behind", "closed", "used"];
const SPEEDS = [2, 10, 30];

const named = (names) => (values) => Object.fromEntries(names.map((name, index) => [name, values[index]]));

export class Replay {
  constructor(story) {
    this.story = { ...story, requests: story.requests.map(named(REQUEST)), steps: story.steps.map(named(STEP)) };
    this.chosen = null;
    this.at = 0;
    this.#build();
    this.go(0);
  }

  #build() {
    const { story } = this;
    const last = story.steps.length - 1;
    const button = (label, name, act) => el("button", { type: "button", "aria-label": name, title: name, on: { click: act } }, label);
    this.slider = el("input", { type: "range", id: "step", min: 0, max: Math.max(0, last), value: 0, "aria-label": "Step", on: { input: () => this.go(Number(this.slider.value)) } });
    this.play = button("Play", "play", () => this.#run());
    this.speed = el("select", { "aria-label": "Steps a second" }, SPEEDS.map((speed) => el("option", { value: speed, selected: speed === 10 }, `${speed} a second`)));
    this.chart = el("canvas", { class: "chart", role: "img", "aria-label": "Tokens of every step; a click goes there" });
    this.chart.addEventListener("click", (event) => this.go(Math.round((event.offsetX / this.chart.clientWidth) * last)));
    this.head = el("p", { class: "wall", role: "status" });
    this.why = el("p", { class: "verdict" });
    this.lists = Object.fromEntries([["computed", "Computed"], ["left", "Have a slot, left out"], ["waiting", "Wait, whoever is next first"], ["preempted", "Lost their place"]].map(([name, title]) => {
      const list = el("ul", { class: "requests", "aria-label": title });
      const number = el("span", { class: "aside" });
      return [name, { list, number, node: el("section", { class: "card" }, el("h2", {}, title, number), list) }];
    }));
    this.history = el("section", { class: "card history", hidden: true, "aria-live": "polite" });
    this.node = el("div", { class: "replay" },
      el("div", { class: "row" }, el("h1", {}, story.name), el("span", { class: "aside" }, `${plural(story.steps.length, "step")}${story.num_left_out ? `, ${count(story.num_left_out)} before them are not shown` : ""}; ${count(story.slots)} slots, ${count(story.budget)} tokens a step, ${count(story.blocks)} blocks of ${story.block_size}; version ${story.version}`)),
      el("section", { class: "card" },
        el("div", { class: "row" }, button("|◀", "first step", () => this.go(0)), button("◀", "step back", () => this.go(this.at - 1)), this.play, button("▶", "step on", () => this.go(this.at + 1)), button("▶|", "last step", () => this.go(last)), this.speed,
          button("Next preemption", "next preemption", () => this.#find((step) => step.preempted.length)), el("span", { class: "space" })),
        this.slider, this.chart, this.head, this.why),
      this.history,
      el("div", { class: "columns" }, this.lists.computed.node, el("div", { class: "panels" }, this.lists.waiting.node, this.lists.preempted.node, this.lists.left.node)));
    document.addEventListener("keydown", (event) => {
      if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (by) this.go(this.at + by);
    });
    new ResizeObserver(() => this.#drawChart()).observe(this.chart);
    document.addEventListener("theme-changed", () => this.#drawChart());
  }

  go(at) {
    const { steps } = this.story;
    if (!steps.length) return say(this.head, "The recording has no step.");
    this.at = Math.max(0, Math.min(steps.length - 1, at));
    this.slider.value = this.at;
    const step = steps[this.at];
    const tokens = step.rows.reduce((sum, [, , number]) => sum + number, 0);
    const prompts = step.rows.filter(([who, first]) => first < this.story.requests[who].prompt).length;
    this.slider.setAttribute("aria-valuetext", `step ${step.number}`);
    say(this.head, `Step ${count(step.number)} computes ${plural(tokens, "token")} of ${count(this.story.budget)}: ${plural(prompts, "prompt")}, ${count(step.rows.length - prompts)} decoding. ${count(step.running.length)} of ${count(this.story.slots)} slots, ${count(step.used)} of ${count(this.story.blocks)} blocks, ${duration(1000 * (step.time - steps[0].time))} after the first.`);
    say(this.why, this.#verdict(step));
    const computed = new Set(step.rows.map(([who]) => who));
    const blocks = new Map(step.running);
    const most = Math.max(...step.rows.map(([, , number]) => number));
    this.#fill("computed", step.rows.map(([who, first, number, samples]) => this.#row(who, phaseOfRow([who, first, number, samples], this.story.requests[who].prompt), number / most,
      `tokens ${count(first)}${number > 1 ? ` to ${count(first + number - 1)}` : ""}${samples ? "" : ", none chosen"}`, blocks.get(who))));
    this.#fill("left", step.running.filter(([who]) => !computed.has(who)).map(([who, held]) => this.#row(who, "paused", 0, "", held)));
    this.#fill("waiting", step.waiting.map((who) => this.#row(who, "queue", 0, who === step.next ? `next: ${step.reason}` : this.#behind(step, who), undefined)), step.numWaiting);
    this.#fill("preempted", step.preempted.map(([who, by, swapped]) => this.#row(who, "preempted", 1, `for class ${by}, ${swapped ? "moved out" : "to be computed again"}`, undefined)));
    this.#drawChart();
    this.#drawHistory();
    return undefined;
  }

  #verdict(step) {
    if (!step.reason) return "Nobody was kept waiting.";
    const closed = step.closed.length ? ` Classes that hold as much as they may: ${step.closed.join(", ")}.` : "";
    const next = step.next === null ? "All wait" : `Next is ${clientId(this.story.requests[step.next].id)}, and it waits`;
    return `${next}: ${step.reason}${step.behind ? `, most of it held by class ${step.behind}` : ""}.${closed}`;
  }

  #behind(step, who) {
    if (step.next === null) return step.reason;
    const { requests } = this.story;
    return requests[who].class === requests[step.next].class ? `behind ${clientId(requests[step.next].id)}` : `class ${requests[step.next].class} ahead`;
  }

  #fill(name, rows, total = rows.length) {
    const { list, number, node } = this.lists[name];
    list.replaceChildren(...rows);
    say(number, rows.length < total ? `${count(rows.length)} of ${count(total)}` : count(total));
    node.hidden = name === "preempted" && !rows.length;
  }

  #row(who, phase, share, text, blocks) {
    const request = this.story.requests[who];
    const fill = el("i");
    fill.style.width = `${100 * share}%`;
    fill.style.background = `var(--${phase})`;
    return el("li", {}, el("button", { type: "button", class: "request", "aria-pressed": String(who === this.chosen), on: { click: () => this.#choose(who) } },
      el("span", { class: "name" }, el("i", { class: `mark ${phase}` }), " ", clientId(request.id)), el("span", { class: "who" }, request.tenant ? `${request.class} · ${request.tenant}` : request.class),
      el("span", { class: "filled" }, fill), el("span", { class: "what", title: text }, text), el("span", { class: "number blocks-of" }, blocks === undefined ? "" : plural(blocks, "block"))));
  }

  #choose(who) {
    this.chosen = this.chosen === who ? null : who;
    this.go(this.at);
  }

  /** What the chosen one did at each step, and who held slots while it waited. */
  #drawHistory() {
    const { chosen } = this;
    this.history.hidden = chosen === null;
    if (chosen === null) return;
    const { requests, steps } = this.story;
    const spans = [];
    const holders = new Map();
    let waited = 0;
    let ran = false;
    steps.forEach((step, index) => {
      const found = phaseOf(step, chosen, requests[chosen]);
      const phase = found === "queue" && ran ? "preempted" : found;
      ran ||= !["", "queue"].includes(phase);
      if (spans.at(-1)?.phase === phase) spans.at(-1).end = index + 1;
      else spans.push({ phase, start: index, end: index + 1 });
      if (phase === "queue" || phase === "preempted") {
        waited++;
        for (const [who] of step.running) holders.set(who, (holders.get(who) ?? 0) + 1);
      }
    });
    const strip = el("div", { class: "parts" }, spans.map(({ phase, start, end }) => {
      const part = el("button", { type: "button", title: `${phase || "not there"}: ${plural(end - start, "step")} from ${count(steps[start].number)}`, "aria-label": `${phase || "not there"}, ${plural(end - start, "step")} from ${steps[start].number}`, on: { click: () => this.go(start) } });
      part.style.flexGrow = end - start;
      part.style.background = phase ? `var(--${phase})` : "var(--free)";
      return part;
    }));
    const most = [...holders].sort((a, b) => b[1] - a[1]).slice(0, 8);
    const request = requests[chosen];
    this.history.replaceChildren(
      el("h2", {}, clientId(request.id), el("span", { class: "aside" }, `${request.class}${request.tenant ? ` · ${request.tenant}` : ""}, ${plural(request.prompt, "prompt token")}, at most ${count(request.most)} more`)),
      strip,
      el("p", { class: "legend" }, waited ? `It waited in ${plural(waited, "step")} of these; meanwhile slots were held by ${most.map(([who, number]) => `${clientId(requests[who].id)} (${requests[who].class}, ${count(number)})`).join(", ")}${holders.size > most.length ? ` and ${count(holders.size - most.length)} others` : ""}.` : "It waited in none of these steps."));
  }

  #drawChart() {
    const { steps, requests } = this.story;
    if (!steps.length || !this.node.isConnected) return;
    const { context, width, height } = sharp(this.chart);
    const wide = width / steps.length;
    const most = Math.max(...steps.map((step) => step.rows.reduce((sum, [, , number]) => sum + number, 0)), 1);
    const scale = (tokens) => Math.sqrt(tokens / most) * (height - 6);
    steps.forEach((step, index) => {
      let prompt = 0;
      let all = 0;
      for (const [who, first, number] of step.rows) {
        all += number;
        if (first < requests[who].prompt) prompt += number;
      }
      const tall = Math.max(1, scale(all));
      context.fillStyle = colour("decode");
      context.fillRect(index * wide, height - tall, Math.max(0.8, wide - (wide > 3 ? 1 : 0)), tall);
      context.fillStyle = colour("prefill");
      context.fillRect(index * wide, height - tall, Math.max(0.8, wide - (wide > 3 ? 1 : 0)), (tall * prompt) / Math.max(1, all));
      if (step.preempted.length) {
        context.fillStyle = colour("preempted");
        context.fillRect(index * wide, 0, Math.max(1.5, wide), 4);
      }
    });
    context.fillStyle = colour("ink");
    context.fillRect((this.at + 0.5) * wide - 0.75, 0, 1.5, height);
  }

  #find(holds) {
    const { steps } = this.story;
    const index = steps.findIndex((step, at) => at > this.at && holds(step));
    if (index >= 0) this.go(index);
  }

  #run() {
    if (this.timer) return this.#halt();
    say(this.play, "Pause");
    const next = () => {
      if (this.at >= this.story.steps.length - 1) return this.#halt();
      this.go(this.at + 1);
      this.timer = setTimeout(next, 1000 / Number(this.speed.value));
      return undefined;
    };
    next();
    return undefined;
  }

  #halt() {
    clearTimeout(this.timer);
    this.timer = null;
    say(this.play, "Play");
  }
}

/** Return what a row of a step does. After the prompt, a row with more tokens than samples recomputes tokens. */
export function phaseOfRow([, first, number, samples], prompt) {
  if (first < prompt) return "prefill";
  return number > Math.max(1, samples) ? "again" : "decode";
}

function phaseOf(step, who, request) {
  const row = step.rows.find(([each]) => each === who);
  if (row) return phaseOfRow(row, request.prompt);
  if (step.running.some(([each]) => each === who)) return "paused";
  if (step.preempted.some(([each]) => each === who)) return "preempted";
  return step.waiting.includes(who) ? "queue" : "";
}

/** In a file of its own: what it shows stands beside it as data. */
export function showStory() {
  setUpTheme(document.getElementById("theme"));
  const replay = new Replay(JSON.parse(document.getElementById("story").textContent));
  document.getElementById("main").append(replay.node);
  replay.go(0);
}
