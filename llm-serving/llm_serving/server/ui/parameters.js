// The form of parameters, made from the table the server tells: names, rules, defaults and meanings stand there alone.

import { askJson } from "./api.js";
import { el } from "./dom.js";

const FIRST = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"];
const OWN = ["logprobs", "prompt_logprobs", "detokenize"];
// These have a place of their own, or leave nothing to show.

const READERS = {
  integer: (text) => {
    if (!/^[+-]?\d+$/.test(text)) throw new Error("must be an integer");
    const number = Number(text);
    return Number.isSafeInteger(number) ? number : BigInt(text);
  },
  number: (text) => {
    if (!Number.isFinite(Number(text))) throw new Error("must be a number");
    return Number(text);
  },
  boolean: (text) => text === "true",
  strings: (text) => text.split("\n").filter((line) => line !== ""),
  token_ids: (text) => text.split(/[\s,]+/).filter(Boolean).map((each) => READERS.integer(each)),
  other: (text) => {
    try {
      return JSON.parse(text);
    } catch {
      throw new Error("must be JSON");
    }
  },
};

function shownDefault(row, chat) {
  const value = chat ? row.chat_default : row.default;
  if (row.name === "seed") return "drawn";
  if (row.name === "max_tokens" && value === null) return "all that fit";
  return value === null || (Array.isArray(value) && !value.length) ? "none" : String(value);
}

function fieldOf(row, id) {
  const placeholder = shownDefault(row, true);
  switch (row.kind) {
    case "boolean":
      return el("select", { id }, ["", "true", "false"].map((value) => el("option", { value }, value || `${placeholder} (default)`)));
    case "strings":
      return el("textarea", { id, rows: 2, placeholder: "one a line", spellcheck: false });
    case "integer":
    case "number":
      return el("input", { id, inputMode: row.kind === "integer" ? "numeric" : "decimal", placeholder, autocomplete: "off" });
    default:
      return el("input", { id, placeholder: row.kind === "other" ? "JSON" : "ids, with commas", autocomplete: "off", spellcheck: false });
  }
}

export class ParameterForm {
  constructor() {
    this.table = null;
    this.classes = el("select", { id: "p-class" });
    this.user = el("input", { id: "p-user", autocomplete: "off", placeholder: "nobody" });
    this.timeout = el("input", { id: "p-timeout", inputMode: "decimal", placeholder: "none", autocomplete: "off" });
    this.choices = el("input", { id: "p-n", inputMode: "numeric", placeholder: "1", autocomplete: "off" });
    this.node = el("div", { class: "parameters" });
    this.fields = new Map();
  }

  async load() {
    this.table = await askJson("v1/parameters");
    this.fields.clear();
    const { classes, parameters } = this.table;
    this.classes.replaceChildren(
      ...classes.map((each) => {
        const promise = each.ttft_slo_s === null ? "" : `, first token within ${each.ttft_slo_s} s`;
        const label = `${each.name}${each.default ? " (default)" : ""}${each.allowed ? promise : ", not with this key"}`;
        return el("option", { value: each.default ? "" : each.name, disabled: !each.allowed, selected: each.default }, label);
      }),
    );
    const rows = parameters.filter((row) => !OWN.includes(row.name));
    rows.sort((a, b) => (FIRST.indexOf(a.name) + 1 || 99) - (FIRST.indexOf(b.name) + 1 || 99));
    const shown = rows.map((row) => this.#row(row));
    const split = rows.findIndex((row) => !FIRST.includes(row.name));
    this.node.replaceChildren(
      line("p-class", "class", this.classes, "Who goes first when not all can."),
      ...shown.slice(0, split),
      line("p-n", "n", this.choices, "Answers to the prompt, 1 to 128."),
      el(
        "details",
        {},
        el("summary", {}, "All parameters"),
        el("div", { class: "parameters" },
          ...shown.slice(split),
          line("p-user", "user", this.user, "Within a class users share fairly; with API keys the key says who asks."),
          line("p-timeout", "timeout_s", this.timeout, "Seconds after which the answer is of no more use.")),
      ),
    );
  }

  /** Shows the defaults of conversations, or of completions. */
  setChat(chat) {
    for (const [row, field] of this.fields) if (row.kind === "integer" || row.kind === "number") field.placeholder = shownDefault(row, chat);
  }

  /** The parameters that are given. @throws {Error} One cannot be read; names it. */
  read() {
    const body = {};
    if (this.classes.value) body.priority_class = this.classes.value;
    for (const [row, field] of this.fields) this.#take(body, row.name, row.kind, field);
    this.#take(body, "n", "integer", this.choices);
    if (this.user.value.trim()) body.user = this.user.value.trim();
    this.#take(body, "timeout_s", "number", this.timeout);
    return body;
  }

  #take(body, name, kind, field) {
    const text = kind === "strings" ? field.value : field.value.trim();
    field.removeAttribute("aria-invalid");
    if (text === "") return;
    try {
      body[name] = READERS[kind](text);
    } catch (error) {
      field.setAttribute("aria-invalid", "true");
      field.focus();
      throw new Error(`${name} ${error.message}`);
    }
  }

  #row(row) {
    const id = `p-${row.name}`;
    const field = fieldOf(row, id);
    this.fields.set(row, field);
    return line(id, row.name, field, `${row.meaning} It ${row.rule}.`);
  }
}

function line(id, name, field, meaning) {
  field.setAttribute("aria-describedby", `${id}-meaning`);
  const parts = name.split("_").flatMap((part, index) => (index ? ["_", el("wbr"), part] : [part]));  // where a line may end
  return el("div", { class: "parameter" }, el("label", { for: id }, parts), field, el("p", { id: `${id}-meaning` }, meaning));
}
