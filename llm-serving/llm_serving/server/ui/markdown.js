// Markdown of an answer, as elements. A text becomes text nodes only, so no HTML of a model is ever interpreted.
// Every scan is linear in the text but for the closing marks of a paragraph, which MAX_INLINE bounds.

import { announce, el } from "./dom.js";

const MAX_DEPTH = 6; // of lists in quotes in lists
const MAX_INLINE = 20000; // a longer paragraph is shown without emphasis and links
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const MARKS = { "**": "strong", __: "strong", "~~": "s", "*": "em", _: "em" };
const LINK = /!?\[([^\]\n]{1,1000})\]\(\s{0,9}<?(https?:\/\/[^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s{1,9}"[^"\n]*")?\s{0,9}\)/iy;
const SPECIAL = /\\[!-/:-@[-`{-~]|`+|\*\*|__|~~|[*_]|!?\[|https?:\/\//gi;

/** The elements of a text that grows: those of blocks that have not changed are kept. */
export class Markdown {
  constructor() {
    this.node = el("div", { class: "markdown" });
    this.shown = [];
  }

  show(text) {
    const sources = blocks(text.split("\n"));
    const same = sources.findIndex((source, index) => source.join("\n") !== this.shown[index]);
    const first = same < 0 ? sources.length : same;
    while (this.node.childNodes.length > first) this.node.lastChild.remove();
    this.shown = sources.map((source) => source.join("\n"));
    this.node.append(...sources.slice(first).map((source) => element(source, 0)));
  }
}

/** Splits lines into the lines of each block; blank lines between blocks are dropped. */
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOf(lines, at);
    found.push(lines.slice(at, end));
    at = end;
  }
  return found;
}

function endOf(lines, at) {
  const fence = FENCE.exec(lines[at]);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return end;
  if (QUOTE.test(lines[at])) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  }
  if (ITEM.test(lines[at])) return endOfList(lines, at);
  if (isTable(lines, at)) {
    end += 1;
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return end;
  }
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  return end;
}

/** A list goes on with items, indented lines, and lines that continue a paragraph. */
function endOfList(lines, at) {
  const indent = ITEM.exec(lines[at])[1].length;
  const ordered = /\d/.test(lines[at].trim()[0]);
  let [end, blank] = [at + 1, false];
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) {
      blank = true;
      continue;
    }
    const deeper = line.search(/\S/) > indent + 1;
    const item = !RULE.test(line) && ITEM.exec(line);
    const sibling = item && /\d/.test(line.trim()[0]) === ordered;
    if (!deeper && !sibling && (blank || begins(lines, next))) break;
    [end, blank] = [next + 1, false];
  }
  return end;
}

function begins(lines, at) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(lines[at])) || isTable(lines, at);
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  const rules = cells(lines[at + 1]);
  return rules.every((cell) => /^:?-+:?$/.test(cell)) && rules.length === cells(lines[at]).length;
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
}

function element(lines, depth) {
  const [first] = lines;
  const fence = FENCE.exec(first);
  if (fence) return code(lines.slice(1, lines.length > 1 && closes(lines.at(-1), fence[1]) ? -1 : undefined), fence[2].trim());
  const heading = HEADING.exec(first);
  if (heading) return el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2].trim().replace(/ #+$/, ""), 0));
  if (RULE.test(first)) return el("hr");
  if (depth < MAX_DEPTH && QUOTE.test(first)) {
    const inside = lines.map((line) => line.replace(/^ {0,3}> ?/, ""));
    return el("blockquote", {}, blocks(inside).map((block) => element(block, depth + 1)));
  }
  if (depth < MAX_DEPTH && ITEM.test(first)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return el("p", {}, inline(lines.join("\n"), 0));
}

function list(lines, depth) {
  const [, { length: indent }, mark] = ITEM.exec(lines[0]);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) {
      width = item[0].length;
      items.push([line.slice(width)]);
    } else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), width)));
  }
  const rows = items.map((item) => {
    const inside = blocks(item).map((block) => element(block, depth + 1));
    return el("li", {}, inside.flatMap((node, index) => (index === 0 && node.tagName === "P" ? [...node.childNodes] : [node])));
  });
  const start = Number.parseInt(mark, 10);
  return Number.isNaN(start) ? el("ul", {}, rows) : el("ol", { start }, rows);
}

function table([head, , ...rows]) {
  const row = (tag, line) => el("tr", {}, cells(line).map((cell) => el(tag, {}, inline(cell, 0))));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, rows.map((line) => row("td", line)))));
}

/** A block of code with a button that copies it. */
function code(lines, language) {
  const text = lines.join("\n");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      announce("copied");
    } catch (error) {
      announce(`not copied: ${error.message}`);
    }
  };
  const button = el("button", { type: "button", class: "quiet copy", on: { click: copy } }, "Copy");
  return el("div", { class: "code" }, el("div", { class: "row" }, el("span", {}, language.slice(0, 40)), button), el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function inline(text, depth) {
  if (text.length > MAX_INLINE || depth > MAX_DEPTH) return [text];
  const nodes = [];
  const absent = new Set(); // marks that close nowhere in the rest
  let plain = 0;
  SPECIAL.lastIndex = 0;
  for (let special = SPECIAL.exec(text); special; special = SPECIAL.exec(text)) {
    const at = special.index;
    const found = absent.has(special[0]) ? null : span(text, at, special[0], depth);
    if (!found && text.indexOf(special[0], at + special[0].length) < 0) absent.add(special[0]);
    if (!found) {
      SPECIAL.lastIndex = at + special[0].length;
      continue;
    }
    nodes.push(text.slice(plain, at), found.node);
    plain = SPECIAL.lastIndex = found.end;
  }
  nodes.push(text.slice(plain));
  return nodes.filter((node) => node !== "");
}

/** The element that begins with a mark, and where it ends; null: the mark is text. */
function span(text, at, mark, depth) {
  if (mark[0] === "\\") return { node: mark[1], end: at + 2 };
  if (mark[0] === "`") {
    const end = closing(text, at + mark.length, mark, () => true);
    if (end < 0) return null;
    const inside = text.slice(at + mark.length, end);
    return { node: el("code", {}, isPadded(inside) ? inside.slice(1, -1) : inside), end: end + mark.length };
  }
  if (mark.endsWith("[")) {
    LINK.lastIndex = at;
    const link = LINK.exec(text);
    const node = link && anchor(link[2], inline(link[1], depth + 1).flatMap(withoutLinks));
    return node && { node, end: at + link[0].length };
  }
  if (MARKS[mark]) return emphasis(text, at, mark, depth);
  const [url] = /^[^\s<>"'`|*]*/.exec(text.slice(at, at + 2000));
  let address = url;
  while (/[.,;:!?\]}]$/.test(address) || (address.endsWith(")") && !address.includes("("))) address = address.slice(0, -1);
  const node = address.length > mark.length ? anchor(address, [address]) : null;
  return node && { node, end: at + address.length };
}

/** Code that begins or ends with a backtick stands between spaces, which are not part of it. */
function isPadded(inside) {
  return inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
}

function emphasis(text, at, mark, depth) {
  const start = at + mark.length;
  const inWord = mark[0] === "_" && /[\p{L}\p{N}_]/u.test(text[at - 1] ?? " ");
  if (inWord || /\s/.test(text[start] ?? " ")) return null;
  const end = closing(text, start, mark, (where) => {
    const [before, after] = [text[where - 1], text[where + mark.length] ?? " "];
    return !/\s/.test(before) && !(mark[0] === "_" && /[\p{L}\p{N}]/u.test(after));
  });
  return end < 0 ? null : { node: el(MARKS[mark], {}, inline(text.slice(start, end), depth + 1)), end: end + mark.length };
}

/** Where a run of exactly this mark, or the end of a longer one, closes; -1: nowhere. */
function closing(text, from, mark, fits) {
  for (let end = text.indexOf(mark, from); end >= 0; ) {
    let after = end + mark.length;
    while (text[after] === mark[0]) after += 1;
    const run = after - end;
    const fitting = run === mark.length || (mark[0] !== "`" && run > 2);
    const where = after - mark.length;
    if (end > from && fitting && fits(where)) return where;
    end = text.indexOf(mark, after);
  }
  return -1;
}

function anchor(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return el("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

function withoutLinks(node) {
  return node instanceof HTMLAnchorElement ? [...node.childNodes] : [node];
}
