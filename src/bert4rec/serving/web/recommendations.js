// The columns of recommendations: one a model, each a list of rows.

import { marks, overlap } from "./compare.js";
import { byId, element, nameElement, replaceKeepingFocus, slide } from "./dom.js";
import { iconButton } from "./icons.js";
import { becauseLine, influencesByPlace } from "./influence.js";
import { nameOf } from "./titles.js";
import { factorText, isNeutral, probabilityText } from "./words.js";

const PULLS = 4; // shown inside the chosen row where the screen is too narrow for a panel beside it

/** `chosen` is `{ side, id }`; `on` has choose, preview, add, similar, block. */
export function showRecommendations(sides, history, chosen, on) {
  const columns = byId("columns");
  const top = Math.max(...sides.flatMap(({ answer }) => answer.items.map((item) => item.probability)), 0);
  const made = sides.map((side, index) => column(sides, index, top, history, on));
  slide(columns, () => replaceKeepingFocus(columns, made));
  columns.classList.toggle("two", sides.length > 1);
  markChosen(chosen);
}

/** Only the marks change: no row is made anew under a pointer that rests on it. */
export function markChosen(chosen, previewed = null) {
  for (const row of byId("columns").querySelectorAll(".recommendation")) {
    const isChosen = Number(row.dataset.side) === chosen?.side && row.dataset.id === chosen.id;
    row.classList.toggle("chosen", isChosen);
    row.querySelector(".pick").setAttribute("aria-pressed", String(isChosen));
    row.classList.toggle("same", previewed !== null && row.dataset.id === previewed);
  }
}

function column(sides, index, top, history, on) {
  const side = sides[index];
  const rows = side.answer.items.map((item, place) => row(sides, index, item, place, top, history, on));
  const list = element("ol", { "aria-label": `Recommendations of ${side.name}` }, ...rows);
  const nothing = element("p", { class: "empty" }, "Nothing is left: allow more items, or block fewer.");
  const head = element("h3", { class: "column-head" }, nameElement(side.name), overlap(sides, index));
  return element("div", { class: "column" }, sides.length > 1 ? head : null, rows.length ? list : nothing);
}

function row(sides, index, item, place, top, history, on) {
  const side = sides[index];
  const id = String(item.item);
  const name = nameOf(id);
  const bar = element("span", { class: "bar", "aria-hidden": "true" }, element("span"));
  bar.firstChild.style.width = `${top > 0 ? Math.max(1, (100 * item.probability) / top) : 0}%`;
  const probability = element("span", { class: "probability" }, probabilityText(item.probability));
  const preview = (isOn) => on.preview(isOn ? { side: index, id } : null);
  const key = (part) => `${index}:${id}:${part}`;
  const action = (picture, label, click) => iconButton(picture, label, click, { key: key(picture) });
  const choose = () => on.choose({ side: index, id });
  const pick = element(
    "button",
    { type: "button", class: "pick", "aria-pressed": "false", "data-focus": key("pick"), on: { click: choose } },
    nameElement(name),
  );
  return element(
    "li",
    {
      class: "recommendation",
      "data-id": id,
      "data-side": index,
      "data-slide": `${index}:${id}`,
      on: {
        pointerenter: (event) => event.pointerType === "mouse" && preview(true),
        pointerleave: (event) => event.pointerType === "mouse" && preview(false),
        focusin: () => preview(true),
        focusout: () => preview(false),
      },
    },
    element("span", { class: "place" }, String(place + 1)),
    element(
      "div",
      { class: "what" },
      element("div", { class: "title-line" }, pick, marks(sides, index, id, place)),
      element("p", { class: "because" }, becauseLine(side, id)),
      pulls(side, history, id),
    ),
    element("div", { class: "chance" }, probability, bar),
    element(
      "div",
      { class: "actions" },
      action("plus", `Add ${name} to the history`, () => on.add(id)),
      side.hasVectors ? action("similar", `Items similar to ${name}`, () => on.similar(id, side.name)) : null,
      action("block", `Never show ${name}`, () => on.block(id)),
    ),
  );
}

function pulls(side, history, id) {
  const found = influencesByPlace(history, side.explanation, id)
    .map((influence, place) => ({ influence, id: history[place] }))
    .filter(({ influence }) => influence !== null && !isNeutral(influence))
    .sort((a, b) => Math.abs(b.influence) - Math.abs(a.influence))
    .slice(0, PULLS);
  if (found.length === 0) return null;
  const chips = found.map((pull) => {
    const attributes = { class: pull.influence > 0 ? "up" : "down" };
    return element("li", attributes, nameElement(nameOf(pull.id)), " ", factorText(pull.influence));
  });
  return element("ul", { class: "pulls", "aria-label": "What pulled it up or down" }, ...chips);
}
