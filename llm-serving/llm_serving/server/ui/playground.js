// Asking the model: a conversation or a text to go on with.

import { address, ask, askJson, chosen, events, key } from "./api.js";
import { announce, count, duration, el, plural, say } from "./dom.js";
import { Markdown } from "./markdown.js";
import { ParameterForm } from "./parameters.js";
import { asCurl, asPython, json } from "./snippets.js";
import { TokenView } from "./tokens.js";

const EXAMPLES = ["What is the capital of France?", "Sort these words alphabetically: sail rocket beach.", "Count from 1 to 60."];

export class Playground {
  static path = "playground";
  static title = "Playground";

  constructor() {
    this.mode = "chat";
    this.turns = [];
    this.running = null;
    this.form = new ParameterForm();
    this.log = el("div", { class: "log", "aria-live": "polite", "aria-label": "Answers" });
    this.input = el("textarea", { id: "prompt", rows: 3, spellcheck: false });
    this.system = el("textarea", { id: "system", rows: 2, spellcheck: false, placeholder: "none" });
    this.stream = el("input", { type: "checkbox", id: "stream", checked: true });
    this.probabilities = el("select", { id: "probabilities" }, [
      ["", "no probabilities"], ["0", "of the token chosen"], ["5", "and the 5 likeliest"], ["20", "and the 20 likeliest"],
    ].map(([value, label]) => el("option", { value, selected: value === "5" }, label)));
    this.send = el("button", { type: "submit", class: "main", id: "send" }, "Send");
    this.stop = el("button", { type: "button", id: "stop", class: "danger", hidden: true, on: { click: () => this.running?.stop() } }, "Stop");
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.node = this.#build();
    this.#setMode("chat");
    document.addEventListener("key-changed", () => this.#load());
  }

  show() {
    if (!this.form.table && !this.loading) this.#load();
  }

  #build() {
    const modes = [["chat", "Chat"], ["completion", "Completion"]].map(([mode, label]) =>
      el("button", { type: "button", "data-mode": mode, on: { click: () => this.#setMode(mode) } }, label));
    this.modes = el("div", { class: "switch", role: "group", "aria-label": "Form of the request" }, modes);
    const copy = (make) => () => this.#copy(make);
    return el(
      "div",
      { class: "playground" },
      el("h1", { class: "unseen" }, "Playground"),
      el(
        "section",
        { class: "talk", "aria-label": "Request and answers" },
        this.log,
        this.error,
        el(
          "form",
          { class: "composer card", on: { submit: (event) => { event.preventDefault(); this.#ask(); } } },
          el("div", { class: "row" }, this.modes, el("button", { type: "button", class: "quiet", id: "clear", on: { click: () => this.#clear() } }, "Clear")),
          (this.systemRow = el("label", { class: "system" }, "System ", this.system)),
          el("label", { for: "prompt", class: "unseen" }, "Prompt"),
          this.input,
          el("div", { class: "row" },
            el("label", { class: "check" }, this.stream, " stream"),
            el("label", { class: "check" }, "tokens ", this.probabilities),
            el("span", { class: "space" }),
            el("button", { type: "button", class: "quiet", id: "copy-curl", on: { click: copy(asCurl) } }, "Copy as curl"),
            el("button", { type: "button", class: "quiet", id: "copy-python", on: { click: copy(asPython) } }, "Copy as Python"),
            this.stop, this.send),
        ),
      ),
      el("aside", { class: "card side", "aria-label": "Parameters" }, el("h2", {}, "Parameters"), this.form.node),
    );
  }

  async #load() {
    this.loading = true;
    try {
      await this.form.load();
      this.form.setChat(this.mode === "chat");
      this.#fail("");
      this.#welcome();
    } catch (error) {
      this.#fail(error.message);
    } finally {
      this.loading = false;
    }
  }

  #welcome() {
    if (this.log.childElementCount || !this.form.table) return;
    const { max_model_len } = this.form.table;
    const model = this.#model();
    const examples = EXAMPLES.map((text) => el("button", { type: "button", class: "example", on: { click: () => { this.input.value = text; this.#ask(); } } }, text));
    this.log.append(el("div", { class: "welcome" }, el("p", {}, "Ask ", el("strong", {}, model), `, up to ${count(max_model_len)} tokens of question and answer.`), el("div", { class: "examples" }, examples)));
  }

  /** The name of the chosen model or adapter. */
  #model() {
    return chosen.get().id ?? this.form.table?.model;
  }

  #setMode(mode) {
    this.mode = mode;
    for (const button of this.modes.children) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    this.systemRow.hidden = mode !== "chat";
    this.form.setChat(mode === "chat");
    this.input.placeholder = mode === "chat" ? "Say something. Return sends, Shift and Return begins a line." : "A text to go on with. Control and Return sends.";
    this.input.onkeydown = (event) => {
      const sends = event.key === "Enter" && !event.isComposing && (mode === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey);
      if (sends) {
        event.preventDefault();
        this.#ask();
      }
    };
  }

  #clear() {
    this.running?.stop();
    this.turns = [];
    this.log.replaceChildren();
    this.#fail("");
    this.#welcome();
    this.input.focus();
  }

  #fail(text) {
    this.error.hidden = !text;
    say(this.error, text);
  }

  /** The request as it stands: [route, body]. */
  #request() {
    const body = { model: this.#model() };
    const text = this.input.value;
    const top = this.probabilities.value;
    if (this.mode === "chat") {
      const system = this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
      body.messages = [...system, ...this.turns, ...(text ? [{ role: "user", content: text }] : [])];
      if (top !== "") Object.assign(body, { logprobs: true, top_logprobs: Number(top) });
    } else {
      body.prompt = text;
      if (top !== "") body.logprobs = Number(top);
    }
    Object.assign(body, this.form.read());
    if (this.stream.checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
    return [this.mode === "chat" ? "chat/completions" : "completions", body];
  }

  async #copy(make) {
    try {
      const text = make(address("."), ...this.#request(), Boolean(key.get()));
      await navigator.clipboard.writeText(text);
      this.#fail("");
      announce("copied");
    } catch (error) {
      this.#fail(`not copied: ${error.message}`);
    }
  }

  async #ask() {
    if (this.running) return;
    let request;
    try {
      request = this.#request();
    } catch (error) {
      this.#fail(error.message);
      return;
    }
    this.#fail("");
    const said = this.input.value;
    this.log.querySelector(".welcome")?.remove();
    this.log.append(el("article", { class: "turn user" }, el("h3", {}, this.mode === "chat" ? "you" : "prompt"), el("p", { class: "text" }, said)));
    const run = new Run(...request, this.log);
    this.running = run;
    if (this.mode === "chat") this.input.value = "";
    this.send.hidden = true;
    this.stop.hidden = false;
    try {
      const answer = await run.finish();
      if (this.mode === "chat" && this.log.contains(run.first)) {
        this.turns.push({ role: "user", content: said }, { role: "assistant", content: answer });
      }
    } catch (error) {
      this.#fail(error.retryAfter ? `${error.message} (try again in ${error.retryAfter} s)` : error.message);
      if (this.mode === "chat" && !this.input.value) this.input.value = said;
    } finally {
      this.running = null;
      this.send.hidden = false;
      this.stop.hidden = true;
    }
  }
}

/** One request and its answers, one card for each choice. */
class Run {
  constructor(route, body, log) {
    this.route = route;
    this.id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
    this.body = { ...body, request_id: this.id };
    this.chat = route !== "completions";
    this.log = log;
    this.answers = new Map();
    this.controller = new AbortController();
    this.began = performance.now();
    this.#answer(0);
    this.first = this.#answer(0).node;
  }

  /** Ends it on the server; the answer keeps what there is. */
  async stop() {
    try {
      await askJson(`v1/requests/${encodeURIComponent(this.id)}/cancel`, { method: "POST" });
    } catch {
      this.controller.abort();
    }
  }

  /** The text of the first answer. */
  async finish() {
    try {
      const response = await ask(`v1/${this.route}`, { method: "POST", body: json(this.body), signal: this.controller.signal });
      const told = [response.headers.get("x-ignored-parameters"), response.headers.get("x-predicted-ttft-ms")];
      [this.ignored, this.predicted] = told;
      if (this.body.stream) for await (const { data } of events(response)) this.#take(data);
      else this.#whole(await response.json());
    } catch (error) {
      if (error.name !== "AbortError") {
        this.#settle(error.message);
        throw error;
      }
    }
    this.#settle("");
    return this.#answer(0).text;
  }

  #take(data) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new Error(piece.error.message);
    if (piece.usage) this.usage = piece.usage;
    for (const choice of piece.choices) {
      const said = this.chat ? choice.delta : { content: choice.text };
      this.#add(choice, said);
    }
  }

  #whole(answer) {
    this.usage = answer.usage;
    for (const choice of answer.choices) this.#add(choice, this.chat ? choice.message : { content: choice.text });
  }

  #add(choice, { content, reasoning_content: thought, tool_calls: calls }) {
    const answer = this.#answer(choice.index);
    const tokens = tokensOf(choice.logprobs);
    const text = content ?? "";
    if ((text || thought || tokens.length) && this.firstMs === undefined) this.firstMs = performance.now() - this.began;
    if (thought) {
      if (!answer.thought) answer.body.prepend((answer.thought = el("span", { class: "thought" })));
      answer.thought.append(thought);
    }
    answer.text += text;
    if (this.chat) this.#draw(answer);
    else answer.body.append(text);
    if (calls) answer.body.append(json(calls, "", "  "));
    answer.tokens.add(tokens);
    if (tokens.length) answer.flip.hidden = false;
    if (choice.finish_reason) answer.end = choice.finish_reason;
    const near = window.innerHeight + window.scrollY > document.body.scrollHeight - 200;
    if (near) answer.node.scrollIntoView({ block: "nearest" });
  }

  /** Shows the Markdown of an answer with the next frame: pieces come faster than they can be seen. */
  #draw(answer) {
    if (!answer.markdown) answer.body.append((answer.markdown = new Markdown()).node);
    answer.drawing ??= requestAnimationFrame(() => {
      answer.drawing = null;
      answer.markdown.show(answer.text);
    });
  }

  #answer(index) {
    const known = this.answers.get(index);
    if (known) return known;
    const tokens = new TokenView();
    const body = el("div", { class: "text" });
    const flip = el("button", { type: "button", class: "quiet flip", hidden: true, "aria-pressed": "false", on: { click: () => turn(flip.getAttribute("aria-pressed") !== "true") } }, "tokens");
    const turn = (shown) => {
      flip.setAttribute("aria-pressed", String(shown));
      [body.hidden, tokens.node.hidden] = [shown, !shown];
    };
    const facts = el("p", { class: "facts" }, "…");
    const node = el("article", { class: "turn answer", "aria-busy": "true" }, el("h3", {}, index ? `answer ${index + 1}` : "answer", flip), body, tokens.node, facts);
    const answer = { text: "", body, tokens, flip, facts, node, end: "" };
    turn("logprobs" in this.body);
    this.answers.set(index, answer);
    this.log.append(node);
    return answer;
  }

  #settle(error) {
    const seconds = (performance.now() - this.began) / 1000;
    for (const [index, answer] of this.answers) {
      answer.node.removeAttribute("aria-busy");
      answer.markdown?.show(answer.text);
      const { usage } = this;
      const facts = [];
      if (error) facts.push(error);
      if (answer.end) facts.push(`ended: ${answer.end}`);
      if (!index && this.body.stream && this.firstMs !== undefined) facts.push(`first token ${duration(this.firstMs)}${this.predicted ? ` (predicted ${duration(Number(this.predicted))})` : ""}`);
      if (!index && usage) {
        const { prompt_tokens, completion_tokens, prompt_tokens_details } = usage;
        facts.push(`${plural(prompt_tokens, "prompt token")}, ${count(prompt_tokens_details?.cached_tokens ?? 0)} of them cached`);
        facts.push(`${plural(completion_tokens, "token")} in ${duration(1000 * seconds)}, ${count(completion_tokens / seconds)} a second`);
      }
      if (!index && this.ignored) facts.push(`ignored: ${this.ignored}`);
      answer.facts.replaceChildren(facts.join(" · "));
      if (!index && !error) answer.facts.append(" · ", el("a", { href: `#/why/${this.id}` }, "Why did it take so long?"));
      if (!answer.tokens.tokens.length) [answer.body.hidden, answer.tokens.node.hidden] = [false, true];
    }
  }
}

/** Tokens as `TokenView` takes them, from either form of log-probabilities. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      text: each.token, logprob: each.logprob, top: each.top_logprobs.map((top) => ({ text: top.token, logprob: top.logprob })),
    }));
  }
  return logprobs.tokens.map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index] ?? 0,
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}
