// The live view: one stream of pictures, drawn as they come.

import { AdvicePanel } from "./advice.js";
import { ask, events } from "./api.js";
import { count, el, say } from "./dom.js";
import { LiveState } from "./live_state.js";
import { Classes, Rates, ReplicaPanels, Tenants, panel } from "./panels.js";
import { Rows } from "./rows.js";

const TILES = [["running", "running"], ["waiting", "waiting"], ["output", "tokens/s out"], ["prompt", "tokens/s in"], ["hits", "prefix hits"], ["preemptions", "preemptions"], ["violations", "bounds broken"]];
const TRACK_MS = 150;
const RETRY_S = [1, 2, 5, 10];

export class Live {
  static path = "live";
  static title = "Live";

  constructor() {
    this.state = new LiveState();
    this.rows = new Rows();
    this.classes = new Classes();
    this.tenants = new Tenants();
    this.rates = new Rates();
    this.replicas = new Map();
    this.frozen = false;
    this.tiles = Object.fromEntries(TILES.map(([name]) => [name, el("strong", {}, "–")]));
    this.message = el("p", { class: "error", role: "status", hidden: true });
    this.others = el("p", { class: "more" });
    this.freeze = el("button", { type: "button", id: "freeze", "aria-pressed": "false", on: { click: () => this.#setFrozen(!this.frozen) } }, "Freeze");
    this.engine = el("div", { class: "panels" });
    this.node = el("div", { class: "live" },
      el("div", { class: "row" }, el("h1", {}, "Live"), el("span", { class: "space" }), this.freeze),
      this.message,
      el("dl", { class: "tiles" }, TILES.map(([name, label]) => el("div", { class: "card tile", "data-tile": name }, el("dt", {}, label), el("dd", {}, this.tiles[name])))),
      el("div", { class: "board" },
        el("section", { class: "card requests-card", "aria-label": "Requests" }, el("h2", {}, "Requests", (this.reach = el("span", { class: "aside" }))), this.rows.node, this.others),
        el("div", { class: "panels" }, this.engine,
          panel("Tokens a second", el("span", { class: "aside" }, "blue out, amber in"), this.rates.node),
          panel("Classes", "", this.classes.node), panel("Tenants", "", this.tenants.node),
          panel("Advice", "", new AdvicePanel().node))));
    document.addEventListener("key-changed", () => this.#again());
    document.addEventListener("theme-changed", () => this.#draw());
  }

  show() {
    if (this.controller) return;
    this.#watch();
    clearTimeout(this.moving);
    const move = () => {
      if (!this.frozen && this.state.picture && !document.hidden) this.rows.drawTracks(this.#time(), this.span);
      this.moving = setTimeout(() => requestAnimationFrame(move), TRACK_MS);
    };
    requestAnimationFrame(move);
  }

  hide() {
    clearTimeout(this.moving);
    this.controller?.abort();
    this.controller = null;
  }

  #again() {
    if (!this.controller) return;
    this.hide();
    this.show();
  }

  /** The engine's clock now, as far as the pictures tell. */
  #time() {
    return this.state.now + Math.min(1, (performance.now() - this.came) / 1000);
  }

  async #watch() {
    const controller = (this.controller = new AbortController());
    for (let tries = 0; this.controller === controller; tries++) {
      try {
        const response = await ask("v1/live", { signal: controller.signal });
        this.state = new LiveState();
        for await (const { event, data } of events(response)) {
          tries = 0;
          this.state.take(event, JSON.parse(data));
          this.came = performance.now();
          this.#say("");
          if (!this.frozen && !document.hidden) this.#draw();
        }
        this.#say("the stream has ended; asking again");
      } catch (error) {
        if (controller.signal.aborted) return;
        this.#say(error.message);
        if (error.status === 401) {
          this.controller = null;
          document.addEventListener("key-changed", () => this.node.isConnected && this.show(), { once: true });
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, 1000 * RETRY_S[Math.min(tries, RETRY_S.length - 1)]));
    }
  }

  #say(text) {
    this.message.hidden = !text;
    say(this.message, text);
  }

  #setFrozen(frozen) {
    this.frozen = frozen;
    this.freeze.setAttribute("aria-pressed", String(frozen));
    say(this.freeze, frozen ? "Go on" : "Freeze");
    if (!frozen) this.#draw();
  }

  #draw() {
    const { state } = this;
    const { picture } = state;
    if (!picture || !this.node.isConnected) return;
    const sum = (name) => picture.replicas.reduce((total, each) => total + each[name], 0);
    const { totals } = picture;
    const { rate } = state;
    say(this.tiles.running, count(sum("running")));
    say(this.tiles.waiting, count(sum("waiting")));
    say(this.tiles.output, count(rate.output));
    say(this.tiles.prompt, count(rate.prompt));
    say(this.tiles.hits, totals.prefix_queries ? `${Math.round((100 * totals.prefix_hits) / totals.prefix_queries)} %` : "–");
    say(this.tiles.preemptions, count(totals.preemptions));
    say(this.tiles.violations, count(totals.bound_violations));
    this.tiles.violations.parentElement.parentElement.classList.toggle("alarm", totals.bound_violations > 0);
    this.span = state.span;
    say(this.reach, `the last ${this.span} seconds`);
    const unseen = this.rows.draw(state);
    say(this.others, unseen ? `and ${count(unseen)} that are not shown one by one` : "");
    for (const replica of picture.replicas) {
      let panels = this.replicas.get(replica.replica);
      if (!panels) {
        panels = new ReplicaPanels(replica.replica, picture.replicas.length + picture.silent.length > 1);
        this.replicas.set(replica.replica, panels);
        this.engine.append(panels.node);
      }
      panels.draw(replica, state.steps.get(replica.replica) ?? []);
    }
    if (picture.silent.length) this.#say(`replica ${picture.silent.join(", ")} does not answer: its step takes long, or its WorkAgent is being started again`);
    this.classes.draw(picture);
    this.tenants.draw(picture);
    this.rates.draw(state.rates);
    this.rows.drawTracks(this.#time(), this.span);
  }
}
