// What the engines hold: slots, blocks of the cache, steps, classes, tenants, rates.

import { clientId, colour, count, duration, el, plural, say, sharp } from "./dom.js";

function percent(part, whole) {
  const share = (100 * part) / whole;
  return whole ? `${share > 0 && share < 1 ? "< 1" : Math.round(share)}\u00a0%` : "–";
}

/** A table whose rows are made anew; the head stays. */
function table(caption, heads) {
  const body = el("tbody");
  const node = el("div", { class: "scroll" }, el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), body));
  return { node, body };
}

function cells(...values) {
  return el("tr", {}, values.map((value, index) => (index ? el("td", { class: "number" }, value) : el("th", { scope: "row" }, value))));
}

/** The slots of the batch, each as full as its request is far. */
class Slots {
  constructor() {
    this.node = el("div", { class: "slots", role: "img" });
    this.slots = [];
  }

  draw(replica) {
    while (this.slots.length < replica.slots) {
      const fill = el("i");
      const node = el("span", { class: "slot" }, fill);
      this.slots.push({ node, fill });
      this.node.append(node);
    }
    while (this.slots.length > replica.slots) this.slots.pop().node.remove();
    this.slots.forEach(({ node, fill }, index) => {
      const row = replica.running_requests[index];
      const phase = row ? row.phase : index < replica.running ? "other" : "";
      if (node.dataset.phase !== phase) node.dataset.phase = phase;
      const title = row ? `${clientId(row.id)}: ${row.phase}, ${row.tokens} of at most ${row.most} tokens` : phase ? "another tenant's" : "free";
      if (node.title !== title) node.title = title;
      fill.style.height = row ? `${Math.max(8, (100 * row.tokens) / row.most)}%` : phase ? "100%" : "0";
    });
    this.node.setAttribute("aria-label", `${replica.running} of ${replica.slots} slots run`);
  }
}

/** The blocks: one strip, in it each owner's, then what is kept for later and what is free. */
class Cache {
  constructor() {
    this.strip = el("div", { class: "strip", role: "img" });
    this.legend = el("p", { class: "legend" });
    this.node = el("div", {}, this.strip, this.legend);
  }

  draw(replica) {
    const { total, used, cached, host_total: hostTotal, host_used: hostUsed } = replica.blocks;
    const rows = replica.running_requests;
    const own = rows.reduce((sum, row) => sum + row.blocks - row.shared, 0);
    const groups = new Map();
    for (const row of rows) {
      if (row.group === null) continue;
      const group = groups.get(row.group) ?? { blocks: 0, names: [] };
      group.blocks = Math.max(group.blocks, row.shared);
      group.names.push(clientId(row.id));
      groups.set(row.group, group);
    }
    const shared = [...groups.values()].reduce((sum, group) => sum + group.blocks, 0);
    const others = Math.max(0, used - own - shared);
    const keeps = Math.max(0, Math.min(cached, total - used));
    const parts = [
      ...[...groups.values()].map((group) => ["shared", group.blocks, `${plural(group.blocks, "block")} shared by ${group.names.slice(0, 6).join(", ")}${group.names.length > 6 ? " and others" : ""}`]),
      ...rows.map((row) => [row.phase, row.blocks - row.shared, `${plural(row.blocks - row.shared, "block")} of ${clientId(row.id)}`]),
      ["other", others, `${plural(others, "block")} of others`],
      ["cached", keeps, `up to ${plural(keeps, "free block")} with prefixes that can be found`],
      ["free", total - used - keeps, `${plural(total - used - keeps, "block")} free`],
    ].filter(([, blocks]) => blocks > 0);
    while (this.strip.childElementCount > parts.length) this.strip.lastChild.remove();
    while (this.strip.childElementCount < parts.length) this.strip.append(el("span"));
    parts.forEach(([kind, blocks, title], index) => {
      const node = this.strip.children[index];
      node.className = `part ${kind}`;
      node.style.flexGrow = blocks;
      if (node.title !== title) node.title = title;
    });
    this.strip.setAttribute("aria-label", `${used} of ${total} blocks used`);
    const facts = [
      ["decode", `${count(own)} of one request`], ["shared", `${count(shared)} shared, ${count(Math.max(0, replica.saved))} saved by it`],
      ...(others ? [["other", `${count(others)} of others`]] : []), ["cached", `${count(keeps)} findable`], ["free", `${count(total - used - keeps)} free`],
    ];
    this.legend.replaceChildren(...facts.map(([kind, text]) => el("span", {}, el("i", { class: `mark ${kind}` }), text)),
      el("span", {}, `of ${count(total)} blocks of ${replica.blocks.tokens} tokens`), hostTotal ? el("span", {}, `host pool ${count(hostUsed)} / ${count(hostTotal)}`) : "");
  }
}

/** Steps: how long each took, and whether for prompts or for tokens. */
class Steps {
  constructor() {
    this.canvas = el("canvas", { class: "chart", role: "img" });
    this.text = el("p", { class: "legend" });
    this.node = el("div", {}, this.canvas, this.text);
  }

  draw(replica, steps) {
    const { context, width, height } = sharp(this.canvas);
    const longest = Math.max(...steps.map((step) => step.seconds), 1e-4);
    const wide = width / 160;
    steps.forEach((step, index) => {
      const x = width - (steps.length - index) * wide;
      const tall = Math.max(2, (step.seconds / longest) * (height - 14));
      const share = step.prompt_tokens / Math.max(1, step.prompt_tokens + step.decoding);
      context.fillStyle = colour("decode");
      context.fillRect(x, height - tall, Math.max(1, wide - 1), tall);
      context.fillStyle = colour("prefill");
      context.fillRect(x, height - tall, Math.max(1, wide - 1), tall * share);
    });
    context.fillStyle = colour("faint");
    context.font = "11px system-ui, sans-serif";
    if (steps.length) context.fillText(`longest ${duration(1000 * longest)}`, 2, 10);
    const last = steps.at(-1);
    const tokens = last ? last.prompt_tokens + last.decoding : 0;
    say(this.text, last ? `last: ${duration(1000 * last.seconds)}, ${count(last.prompt_tokens)} prompt + ${count(last.decoding)} decoding of a budget of ${count(replica.budget)} tokens (${percent(tokens, replica.budget)})` : `no step since this was opened; budget ${count(replica.budget)} tokens`);
    this.canvas.setAttribute("aria-label", steps.length ? `times of the newest ${steps.length} steps, the longest ${duration(1000 * longest)}` : "times of steps: none yet");
  }
}

export class ReplicaPanels {
  constructor(index, several) {
    this.slots = new Slots();
    this.cache = new Cache();
    this.steps = new Steps();
    this.numbers = el("span", { class: "aside" });
    this.used = el("span", { class: "aside" });
    this.pace = el("span", { class: "aside" });
    const name = several ? ` of replica ${index}` : "";
    this.where = el("p", { class: "more", hidden: true });
    this.node = el("div", { class: "panels" }, this.where,
      panel(`Batch slots${name}`, this.numbers, this.slots.node), panel(`Key/value cache${name}`, this.used, this.cache.node), panel(`Steps${name}`, this.pace, this.steps.node));
  }

  draw(replica, steps) {
    this.slots.draw(replica);
    this.cache.draw(replica);
    this.steps.draw(replica, steps);
    this.where.hidden = !replica.machine;
    say(this.where, replica.machine ? `Replica ${replica.replica} computes at ${replica.machine}` : "");
    say(this.numbers, `${count(replica.running)} of ${count(replica.slots)}`);
    say(this.used, percent(replica.blocks.used, replica.blocks.total));
    say(this.pace, `step ${count(replica.step)}${replica.step_s ? `, ${duration(1000 * replica.step_s)} of late` : ""}`);
  }
}

export function panel(title, aside, ...content) {
  return el("section", { class: "card panel" }, el("h2", {}, title, aside), ...content);
}

export class Classes {
  constructor() {
    const { node, body } = table("Classes of requests", ["class", "running", "waiting", "blocks", "oldest", "first token in time", "pace kept"]);
    this.body = body;
    this.bounds = el("details", { class: "bounds" }, el("summary", {}, "What each is promised"), (this.promises = el("ul")));
    this.node = el("div", {}, node, this.bounds);
  }

  draw({ replicas, kept }) {
    const sums = new Map();
    for (const replica of replicas) {
      for (const row of replica.classes) {
        const sum = sums.get(row.request_class) ?? { running: 0, waiting: 0, blocks: 0, oldest: null, bounds: row.bounds };
        sum.running += row.running;
        sum.waiting += row.waiting;
        sum.blocks += row.blocks;
        if (row.oldest_s !== null) sum.oldest = Math.max(sum.oldest ?? 0, row.oldest_s);
        sums.set(row.request_class, sum);
      }
    }
    const inTime = (name, target) => {
      const [met, missed] = kept[name]?.[target] ?? [0, 0];
      return met + missed ? `${percent(met, met + missed)} of ${count(met + missed)}` : "–";
    };
    this.body.replaceChildren(...[...sums].map(([name, sum]) =>
      cells(name, count(sum.running), count(sum.waiting), count(sum.blocks), sum.oldest === null ? "–" : duration(1000 * sum.oldest), inTime(name, "ttft"), inTime(name, "tpot"))));
    if (this.bounds.open || !this.promises.childElementCount) this.promises.replaceChildren(...[...sums.values()].map((sum) => el("li", {}, sum.bounds)));
  }
}

export class Tenants {
  constructor() {
    const { node, body } = table("Tenants", ["tenant", "running", "waiting", "blocks"]);
    [this.node, this.body] = [node, body];
  }

  draw({ replicas }) {
    const sums = new Map();
    for (const row of replicas.flatMap((replica) => replica.tenants)) {
      const sum = sums.get(row.tenant) ?? { running: 0, waiting: 0, blocks: 0 };
      for (const name of Object.keys(sum)) sum[name] += row[name];
      sums.set(row.tenant, sum);
    }
    const rows = [...sums].sort((a, b) => b[1].running + b[1].waiting - a[1].running - a[1].waiting).slice(0, 12);
    this.body.replaceChildren(...rows.map(([name, sum]) => cells(name || "(no name)", count(sum.running), count(sum.waiting), count(sum.blocks))));
    return sums.size;
  }
}

/** Tokens a second over the last minute. */
export class Rates {
  constructor() {
    this.node = el("canvas", { class: "chart short", role: "img", "aria-label": "tokens a second over the last minute" });
  }

  draw(rates) {
    const { context, width, height } = sharp(this.node);
    const most = Math.max(...rates.map((rate) => Math.max(rate.output, rate.prompt)), 1);
    for (const [name, kind] of [["prompt", "prefill"], ["output", "decode"]]) {
      context.beginPath();
      rates.forEach((rate, index) => {
        const x = width - ((rates.length - 1 - index) * width) / 239;
        const y = height - 2 - (rate[name] / most) * (height - 16);
        if (index) context.lineTo(x, y);
        else context.moveTo(x, y);
      });
      context.strokeStyle = colour(kind);
      context.lineWidth = 1.75;
      context.stroke();
    }
    context.fillStyle = colour("faint");
    context.font = "11px system-ui, sans-serif";
    context.fillText(`${count(most)} a second`, 2, 10);
  }
}
