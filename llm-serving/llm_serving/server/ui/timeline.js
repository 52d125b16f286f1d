// The newest steps and the requests that lived meanwhile, as rows of time that can be gone into.

import { askJson } from "./api.js";
import { clientId, colour, count, duration, el, plural, say, sharp } from "./dom.js";

/** Part of a request's time -> name of its colour. */
export const COLOUR_OF = {
  tokenizing: "shared", inbox: "paused", queued: "queue", prefill: "prefill", "computed again": "again", sharing: "cached", decode: "decode",
  device: "strong-line", preempted: "preempted", restart: "bad", "other choices": "paused", sending: "done", "not kept": "free",
};
const ROW = 19;
const MOST_ROWS = 48;
const NAMES = 130;
const LABEL = 70;

export class Timeline {
  constructor() {
    this.rows = [];
    this.chosen = new Set();
    this.steps = el("select", { id: "timeline-steps" }, [200, 1000, 5000].map((number) => el("option", { value: number, selected: number === 1000 }, `newest ${count(number)} steps`)));
    this.steps.addEventListener("change", () => this.load([...this.chosen]));
    this.canvas = el("canvas", { class: "timeline", tabIndex: 0, role: "img", "aria-label": "Timeline; plus and minus zoom, the arrow keys move" });
    this.text = el("p", { class: "legend", role: "status" }, " ");
    const button = (label, name, act) => el("button", { type: "button", "aria-label": name, title: name, on: { click: act } }, label);
    this.node = el("section", { class: "card" },
      el("h2", {}, "Timeline", el("span", { class: "aside row" }, this.steps, button("−", "zoom out", () => this.#zoom(2)), button("+", "zoom in", () => this.#zoom(0.5)), button("⟷", "show all", () => this.#fit()))),
      this.canvas, this.text);
    this.#listen();
  }

  /** Fetches it anew; the requests of these ids stand first. */
  async load(ids) {
    this.chosen = new Set(ids);
    try {
      const { traceEvents } = await askJson(`v1/timeline?steps=${this.steps.value}`);
      this.#take(traceEvents);
    } catch (error) {
      if (error.status === 400) this.#take((await askJson("v1/timeline")).traceEvents);
      else say(this.text, error.message);
    }
  }

  #take(events) {
    const rows = new Map();
    const row = (event) => {
      const key = `${event.pid}/${event.tid}`;
      if (!rows.has(key)) rows.set(key, { name: key, key, tid: event.tid, events: [] });
      return rows.get(key);
    };
    for (const event of events) {
      if (event.ph === "M" && event.name === "thread_name") row(event).name = event.args.name;
      if (event.ph === "X") row(event).events.push(event);
    }
    const all = [...rows.values()].filter((each) => each.events.length);
    const steps = all.filter((each) => each.tid === 0);
    const chosen = all.filter((each) => this.chosen.has(each.name));
    const others = all.filter((each) => each.tid !== 0 && !this.chosen.has(each.name)).reverse();
    this.rows = [...steps, ...chosen, ...others].slice(0, MOST_ROWS);
    this.left = all.length - this.rows.length;
    this.numChosen = chosen.length;
    const ends = all.flatMap((each) => each.events.map((event) => event.ts + event.dur));
    const starts = all.flatMap((each) => each.events.map((event) => event.ts));
    this.whole = [starts.reduce((least, each) => Math.min(least, each), 0), ends.reduce((most, each) => Math.max(most, each), 1)];
    const own = chosen.flatMap((each) => each.events);
    if (own.length) {
      const start = own[0].ts;
      const end = own.reduce((most, each) => Math.max(most, each.ts + each.dur), start + 1);
      this.shown = [start - 0.05 * (end - start), end + 0.05 * (end - start)];
    } else this.shown = [...this.whole];
    this.canvas.style.height = `${Math.max(3, this.rows.length) * ROW + 20}px`;
    this.draw();
  }

  draw() {
    if (!this.rows.length || !this.node.isConnected) return;
    const { context, width } = sharp(this.canvas);
    const [start, end] = this.shown;
    const x = (time) => NAMES + ((time - start) / (end - start)) * (width - NAMES);
    context.font = "11px system-ui, sans-serif";
    this.#ticks(context, x, width);
    this.rows.forEach((row, index) => {
      const y = 18 + index * ROW;
      const chosen = this.chosen.has(row.name);
      context.fillStyle = colour(chosen ? "accent" : "soft");
      context.fillText(row.tid === 0 ? "steps" : clientId(row.name).slice(0, 17), 2, y + 13);
      if (chosen) {
        context.fillStyle = colour("accent-wash");
        context.fillRect(NAMES, y, width - NAMES, ROW - 1);
      }
      for (const event of row.events) {
        const left = x(event.ts);
        const wide = Math.max(0.6, x(event.ts + event.dur) - left);
        if (left > width || left + wide < NAMES) continue;
        const from = Math.max(NAMES, left);
        context.fillStyle = colourOf(event);
        context.fillRect(from, y + 3, Math.min(wide - (from - left), width - from) - (wide > 4 ? 1 : 0), ROW - 7);
      }
    });
    say(this.text, this.told ?? `${plural(this.rows.length, "row")}${this.left > 0 ? ` of ${count(this.rows.length + this.left)}` : ""}, ${duration((end - start) / 1000)} shown of ${duration((this.whole[1] - this.whole[0]) / 1000)}. The wheel zooms, the pointer drags.`);
  }

  #ticks(context, x, width) {
    const [start, end] = this.shown;
    const rough = (end - start) / Math.max(1, Math.min(8, Math.floor((width - NAMES) / LABEL)));
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    for (let time = Math.ceil(start / step) * step; time < end; time += step) {
      const at = x(time);
      if (at > width - 40) break;
      context.fillStyle = colour("line");
      context.fillRect(at, 14, 1, this.rows.length * ROW + 4);
      context.fillStyle = colour("faint");
      context.fillText(duration((time - this.whole[0]) / 1000), at + 3, 10);
    }
  }

  #listen() {
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.#zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
    }, { passive: false });
    let from = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      from = event.offsetX;
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => (from = null));
    this.canvas.addEventListener("pointermove", (event) => {
      if (from !== null) {
        this.#move(from - event.offsetX);
        from = event.offsetX;
      } else this.#tell(event.offsetX, event.offsetY);
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.told = null;
      this.draw();
    });
    this.canvas.addEventListener("keydown", (event) => {
      const act = { "+": () => this.#zoom(0.5), "=": () => this.#zoom(0.5), "-": () => this.#zoom(2), ArrowLeft: () => this.#move(-80), ArrowRight: () => this.#move(80), 0: () => this.#fit() }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  #scale() {
    return (this.shown[1] - this.shown[0]) / Math.max(1, this.canvas.clientWidth - NAMES);
  }

  #zoom(by, at = (this.canvas.clientWidth + NAMES) / 2) {
    if (!this.shown) return;
    const centre = this.shown[0] + (at - NAMES) * this.#scale();
    const [start, end] = this.shown.map((each) => centre + (each - centre) * by);
    if (end - start > 20 && end - start < 4 * (this.whole[1] - this.whole[0])) this.shown = [start, end];
    this.draw();
  }

  #move(pixels) {
    if (!this.shown) return;
    const by = pixels * this.#scale();
    this.shown = this.shown.map((each) => each + by);
    this.draw();
  }

  #fit() {
    if (!this.shown) return;
    this.shown = [...this.whole];
    this.draw();
  }

  #tell(x, y) {
    const row = this.rows[Math.floor((y - 18) / ROW)];
    const time = this.shown ? this.shown[0] + (x - NAMES) * this.#scale() : 0;
    const event = row && x > NAMES ? row.events.findLast((each) => each.ts <= time && time <= each.ts + Math.max(each.dur, 2 * this.#scale())) : null;
    this.told = event ? `${clientId(row.name)}: ${described(event)}, ${duration(event.dur / 1000)}` : null;
    this.draw();
  }
}

function colourOf(event) {
  if (event.cat !== "step") return colour(COLOUR_OF[event.name] ?? "queue");
  return colour(event.args.prefill_tokens > event.args.decode_rows ? "prefill" : "decode");
}

function described({ cat, name, args }) {
  if (cat === "step") return `step ${count(args.step)}, ${plural(args.prefill_tokens, "prompt token")} of ${args.prefill_rows}, ${args.decode_rows} decoding`;
  return `${name}${args.detail ? ` (${args.detail})` : ""}${args.steps ? `, ${plural(args.steps, "step")}` : ""}`;
}
