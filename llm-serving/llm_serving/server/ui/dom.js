// Elements and texts. What a server sends becomes text here and nothing else.

/** An element. Properties are set as such; those with a dash, `role` and `for` as attributes; `on` holds listeners. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "class") node.className = value;
    else if (name.includes("-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Sets a text only where it has changed: a page that is drawn often moves little. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en");

export function count(number) {
  return whole.format(Math.round(number));
}

const brief = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** A number of which the size matters alone: 423K. */
export function roughly(number) {
  return brief.format(number);
}

/** Milliseconds in the unit that one reads. */
export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** The client's part of an engine's id, which ends with a random number. */
export function clientId(engineId) {
  const end = engineId.lastIndexOf("-");
  return end > 0 ? engineId.slice(0, end) : engineId;
}

const colours = new Map();
document.addEventListener("theme-changed", () => colours.clear());

/** A colour of the style sheet, for canvases; asked for once, as each question has the styles computed. */
export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

/** The drawing context of a canvas as large as it is shown, sharp on every screen. */
export function sharp(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Shows a text for two seconds. */
export function announce(text) {
  const note = el("div", { class: "toast", role: "status" }, text);
  document.body.append(note);
  setTimeout(() => note.remove(), 2000);
}
