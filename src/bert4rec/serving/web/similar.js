// A drawer with the items whose vectors point the same way.

import { get, step } from "./api.js";
import { byId, element, hint, nameElement } from "./dom.js";
import { iconButton } from "./icons.js";
import { nameOf, remember } from "./titles.js";

const SHOWN = 12;

/** `on` has add and failed. */
export async function showSimilar(id, model, on) {
  const drawer = byId("similar");
  let answer;
  try {
    answer = await get(`/v1/items/${step(id)}/similar`, { k: SHOWN, model });
  } catch (error) {
    return on.failed(error);
  }
  remember(answer.items);
  const rows = answer.items.map(({ item, score }) => row(String(item), score, model, on));
  drawer.replaceChildren(
    element(
      "div",
      { class: "panel-head" },
      element("h2", { id: "similar-title" }, "Similar to ", nameElement(nameOf(id))),
      element("span", { class: "spacer" }),
      iconButton("cross", "Close", () => drawer.close()),
    ),
    hint("Items that the model sees in the same light: 1.00 would be the very same."),
    element("ol", { class: "items similar-items" }, ...rows),
  );
  if (!drawer.open) drawer.showModal();
  drawer.scrollTop = 0;
}

function row(id, score, model, on) {
  const name = nameOf(id);
  const add = (event) => {
    on.add(id);
    event.currentTarget.replaceChildren("✓");
    event.currentTarget.setAttribute("aria-label", `${name} was added`);
  };
  const follow = () => showSimilar(id, model, on);
  return element(
    "li",
    { class: "item" },
    element("button", { type: "button", class: "link", on: { click: follow } }, nameElement(name)),
    element("span", { class: "influence" }, score.toFixed(2)),
    element("span", { class: "actions" }, iconButton("plus", `Add ${name} to the history`, add)),
  );
}

/** A click beside the drawer closes it, as Escape does. */
export function startSimilar() {
  const drawer = byId("similar");
  drawer.addEventListener("click", (event) => {
    if (event.target === drawer) drawer.close();
  });
}
