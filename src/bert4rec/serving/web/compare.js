// Two models side by side: which items both chose, and how far apart they placed them.

import { element } from "./dom.js";

const placeIn = (side, id) => side.answer.items.findIndex(({ item }) => String(item) === id);

/** "4 of 10 in both", beside a column's name. */
export function overlap(sides, index) {
  if (sides.length < 2) return null;
  const [mine, theirs] = [sides[index], sides[1 - index]];
  const n = mine.answer.items.filter(({ item }) => placeIn(theirs, String(item)) >= 0).length;
  return element("span", { class: "count" }, `${n} of ${mine.answer.items.length} in both`);
}

/** A mark beside a title: where the other model has this item. */
export function marks(sides, index, id, place) {
  if (sides.length < 2) return null;
  const other = sides[1 - index];
  const there = placeIn(other, id);
  if (there < 0) return null; // only the items that both chose are marked
  const steps = there - place;
  const apart = steps === 0 ? "same place" : `${steps > 0 ? "▲" : "▼"} ${Math.abs(steps)}`;
  const told = steps === 0 ? "at the same place" : `${Math.abs(steps)} ${steps > 0 ? "higher" : "lower"} here`;
  const label = `also chosen by ${other.name}, ${told}`;
  return element(
    "span",
    { class: "mark both", title: label },
    element("span", { "aria-hidden": "true" }, apart),
    element("span", { class: "unseen" }, label),
  );
}
