// Why this one? Bars to the right pulled it up, bars to the left pulled it down.

import { byId, element, hint, nameElement } from "./dom.js";
import { nameOf } from "./titles.js";
import { counted, factorText, influenceSentence, isNeutral, probabilityText } from "./words.js";

const BARS = 12;
const LEGEND =
  "×2 means: with this item in the history, twice as likely as without it. ÷2 means half as likely.";

/** `side` made the recommendation `id`; `influences` has one number (or null) a place of `history`. */
export function showWhy(side, id, history, influences, isCompared) {
  const body = byId("why-body");
  if (!side || id === null) {
    byId("why-title").textContent = "Why?";
    body.replaceChildren(hint("Choose a recommendation to see what led to it."));
    return;
  }
  byId("why-title").replaceChildren("Why ", nameElement(nameOf(id)), "?");
  body.replaceChildren(...explained(side, id, history, influences, isCompared));
}

function explained(side, id, history, influences, isCompared) {
  const item = side.answer.items.find((each) => String(each.item) === id);
  const by = isCompared ? [" by ", nameElement(side.name)] : [];
  // An index finds items without their probability; the explanation knows it.
  const known = item.probability ?? side.explanation?.byItem.get(id)?.probability;
  const probability = element("strong", {}, probabilityText(known));
  const chance = element("p", { class: "lead" }, probability, " likely to be next", ...by);
  if (side.answer.fallback || side.readsNothing) {
    const counts = "how often an item occurs is all that counts.";
    const unknown = history.length ? "The model knows nothing in the history" : "There is no history yet";
    const reason = `${side.answer.fallback ? unknown : "This model looks at no history"}: ${counts}`;
    return [chance, hint(reason)];
  }
  if (side.explanation === undefined) return [chance, hint("Looking for the reasons …")];
  const pulls = influences
    .map((influence, place) => ({ influence, id: history[place] }))
    .filter(({ influence }) => influence !== null)
    .sort((a, b) => Math.abs(b.influence) - Math.abs(a.influence));
  const shown = pulls.filter(({ influence }) => !isNeutral(influence)).slice(0, BARS);
  const strongest = Math.max(0.3, ...shown.map(({ influence }) => Math.abs(influence)));
  const n_rest = pulls.length - shown.length;
  const parts = [chance];
  const bars = shown.map((pull) => bar(pull, strongest));
  if (bars.length) parts.push(element("ul", { class: "bars" }, ...bars));
  const rest = counted(n_rest, bars.length ? "more item" : "item");
  if (n_rest > 0) parts.push(hint(`${rest} with ${bars.length === BARS ? "less" : "no"} influence`));
  if (bars.length) parts.push(hint(LEGEND));
  return parts;
}

function bar({ influence, id }, strongest) {
  const fill = element("span", { class: "fill" });
  fill.style.width = `${(50 * Math.abs(influence)) / strongest}%`;
  return element(
    "li",
    { class: influence > 0 ? "up" : "down" },
    nameElement(nameOf(id)),
    element("span", { class: "unseen" }, `: ${influenceSentence(influence)}`),
    element("span", { class: "factor", "aria-hidden": "true" }, factorText(influence)),
    element("span", { class: "track", "aria-hidden": "true" }, fill),
  );
}
