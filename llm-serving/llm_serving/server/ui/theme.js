// Light, dark, or as the system has it.

const CHOICES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
const STORED = "llm-serving.theme";

export function setUpTheme(button) {
  let choice = localStorage.getItem(STORED);
  if (!CHOICES.includes(choice)) choice = "auto";
  const apply = () => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = SIGNS[choice];
    button.setAttribute("aria-label", `Colours: ${choice}`);
    button.title = `Colours: ${choice}`;
    document.dispatchEvent(new CustomEvent("theme-changed"));
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    localStorage.setItem(STORED, choice);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
