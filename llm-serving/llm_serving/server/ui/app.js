// The frame: which view is shown, the key, the colours, whether the server serves.

import { address, key } from "./api.js";
import { el, say } from "./dom.js";
import { Live } from "./live.js";
import { setUpModel } from "./model.js";
import { Playground } from "./playground.js";
import { setUpTheme } from "./theme.js";
import { Why } from "./why.js";

const VIEWS = [Playground, Live, Why];
const main = document.getElementById("main");
const made = new Map();
let shown = null;

function links() {
  document.getElementById("views").replaceChildren(
    ...VIEWS.map((View) => el("a", { href: `#/${View.path}`, "data-view": View.path }, View.title)),
  );
}

/** Shows what the address names: #/view or #/view/argument. */
function route() {
  const [, path, ...rest] = location.hash.split("/");
  const View = VIEWS.find((each) => each.path === path) ?? VIEWS[0];
  if (!made.has(View)) made.set(View, new View());
  const view = made.get(View);
  if (shown !== view) {
    shown?.hide?.();
    main.replaceChildren(view.node);
    shown = view;
  }
  document.title = `${View.title} · llm-serving`;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === View.path) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  let argument = rest.join("/");
  try {
    argument = decodeURIComponent(argument);
  } catch {
    // A percent sign that begins nothing stays one.
  }
  view.show?.(argument);
}

function setUpKey() {
  const dialog = document.getElementById("key-dialog");
  const text = document.getElementById("key-text");
  const button = document.getElementById("key");
  const mark = () => button.classList.toggle("set", Boolean(key.get()));
  const open = () => {
    if (dialog.open) return;
    text.value = key.get();
    dialog.showModal();
    text.select();
  };
  button.addEventListener("click", open);
  document.addEventListener("key-needed", open);
  // Return in the field chooses the first button of a form, which is another.
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      dialog.close("use");
    }
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "use") key.set(text.value.trim());
    if (dialog.returnValue === "forget") key.set("");
    const changed = ["use", "forget"].includes(dialog.returnValue);
    dialog.returnValue = text.value = "";
    mark();
    if (changed) document.dispatchEvent(new CustomEvent("key-changed"));
  });
  mark();
}

async function watchHealth() {
  const status = document.getElementById("status");
  for (;;) {
    if (!document.hidden) {
      let [state, detail] = ["gone", "the server does not answer"];
      try {
        const response = await fetch(address("health"), { cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(10000) });
        const body = await response.json();
        [state, detail] = [body.status, body.detail];
      } catch {
        // It says so.
      }
      status.dataset.state = state;
      say(status, state === "ready" ? "ready" : detail);
    }
    await new Promise((resolve) => setTimeout(resolve, 5000));
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", route);
setUpTheme(document.getElementById("theme"));
setUpKey();
const models = document.getElementById("model");
document.addEventListener("key-changed", () => setUpModel(models));
setUpModel(models);
links();
route();
watchHealth();
