// The few pictures on buttons, drawn as strokes in the colour of the text.

import { element } from "./dom.js";

const PATHS = {
  plus: ["M10 4v12", "M4 10h12"],
  cross: ["M5 5l10 10", "M15 5L5 15"],
  up: ["M5 12l5-5 5 5"],
  down: ["M5 8l5 5 5-5"],
  block: ["M10 3a7 7 0 100 14 7 7 0 000-14z", "M5.2 5.2l9.6 9.6"],
  similar: ["M8 4.5a4.5 4.5 0 100 9 4.5 4.5 0 000-9z", "M12 6.5a4.5 4.5 0 11-2 8.5"],
  moon: ["M16 11.5A6.5 6.5 0 118.5 4a5 5 0 007.5 7.5z"],
  sun: [
    "M10 6.5a3.5 3.5 0 100 7 3.5 3.5 0 000-7z",
    "M10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18",
    "M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M15.7 4.3l-1.1 1.1M5.4 14.6l-1.1 1.1",
  ],
  key: ["M13 3a4 4 0 100 8 4 4 0 000-8z", "M10.2 9.8L4 16v1h3v-2h2v-2l1.8-1.8"],
};
const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", "0 0 20 20");
  picture.setAttribute("aria-hidden", "true");
  for (const d of PATHS[name]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    picture.append(path);
  }
  return picture;
}

/** A button with a picture; `key` finds it again when its list is made anew. */
export function iconButton(picture, label, click, { key = null, isOff = false } = {}) {
  const attributes = { type: "button", class: "icon", "aria-label": label, title: label, "data-focus": key };
  if (isOff) return element("button", { ...attributes, "aria-disabled": "true" }, icon(picture));
  return element("button", { ...attributes, on: { click } }, icon(picture));
}
