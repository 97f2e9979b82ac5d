// Light or dark: the system's wish, until the person says otherwise.

import { byId } from "./dom.js";
import { icon } from "./icons.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const chosen = () => document.documentElement.dataset.theme; // undefined: nothing yet
const isDark = () => (chosen() === undefined ? system.matches : chosen() === "dark");

export function startColours() {
  byId("theme").addEventListener("click", () => {
    const other = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("bert4rec.theme", other);
    } catch {
      // Storage may be switched off: the choice lasts as long as the page.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}

function show() {
  byId("theme").setAttribute("aria-pressed", String(isDark()));
  byId("theme").replaceChildren(icon(isDark() ? "sun" : "moon"));
  dispatchEvent(new Event("bert4rec:theme")); // what is painted on a canvas has to be painted anew
}
