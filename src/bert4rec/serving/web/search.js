// Finding items by title or id.

import { get } from "./api.js";
import { combobox } from "./combobox.js";
import { byId } from "./dom.js";
import { current } from "./state.js";
import { nameOf, remember } from "./titles.js";
import { counted } from "./words.js";

/** The combobox in the element `boxId`; `take(id)` gets the chosen item. */
export function itemSearch(boxId, { take, failed, staysOpen = false }) {
  const find = async (query, signal) => {
    const { items } = await get("/v1/items", { query, limit: 20, model: current().model }, signal);
    remember(items);
    return items.map(({ item, count }) => {
      const id = String(item);
      return { id, name: nameOf(id), note: counted(count, "time") };
    });
  };
  const nothing = "No item has this in its title or id";
  return combobox(byId(boxId), { find, take: ({ id }) => take(id), nothing, failed, staysOpen });
}
