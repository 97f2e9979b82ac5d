// What an explanation says about the items of the history.

import { element, nameElement } from "./dom.js";
import { nameOf } from "./titles.js";
import { isNeutral } from "./words.js";

const NAMED = 2; // items in a "because of" line

/** For each place of the history: the influence of its item, or null where the model did not read it.
 *
 * The model reads the newest of the items that it knows; `read` are those.
 */
export function influencesByPlace(history, explanation, id) {
  const found = explanation?.byItem.get(id);
  const places = history.map(() => null);
  if (!found) return places;
  const known = history.map((_, place) => place).filter((place) => !explanation.ignored.has(history[place]));
  const read = known.slice(known.length - found.influences.length);
  read.forEach((place, i) => (places[place] = found.influences[i]));
  return places;
}

/** The line below a recommendation: the one or two items that pull most. */
export function becauseLine(side, id) {
  if (side.readsNothing || side.answer.fallback) return element("span", {}, "Popular with everybody");
  const found = side.explanation?.byItem.get(id);
  if (!found) return element("span", {}, side.explanation === undefined ? "…" : "");
  const pulls = side.explanation.read
    .map((item, i) => ({ id: item, influence: found.influences[i] }))
    .filter(({ influence }) => influence > 0 && !isNeutral(influence))
    .sort((a, b) => b.influence - a.influence);
  const ids = [...new Set(pulls.map((pull) => pull.id))].slice(0, NAMED);
  if (ids.length === 0) return element("span", {}, "Nothing in the history pulls it up");
  const names = ids.flatMap((each, i) => [i ? " and " : "", nameElement(nameOf(each))]);
  return element("span", {}, "Because of ", ...names);
}
