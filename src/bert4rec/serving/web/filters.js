// What may be recommended: seen items, only some, never some, and how many.

import { K_CHOICES } from "./address.js";
import { byId, element, nameElement, replaceKeepingFocus } from "./dom.js";
import { iconButton } from "./icons.js";
import { block, change, current } from "./state.js";
import { itemSearch } from "./search.js";
import { nameOf } from "./titles.js";

export function startFilters(failed) {
  byId("exclude-seen").addEventListener("change", (event) => change({ excludeSeen: event.target.checked }));
  byId("k").addEventListener("change", (event) => change({ k: Number(event.target.value) }));
  itemSearch("allow-search", { take: allow, failed });
  itemSearch("block-search", { take: block, failed });
}

function allow(id) {
  const state = current();
  change({ allow: [...new Set([...state.allow, id])], block: state.block.filter((each) => each !== id) });
}

export function showFilters(state) {
  byId("exclude-seen").checked = state.excludeSeen;
  const choices = [...new Set([...K_CHOICES, state.k])].sort((a, b) => a - b);
  byId("k").replaceChildren(...choices.map((k) => element("option", { value: k }, String(k))));
  byId("k").value = String(state.k);
  showChips("allow", state.allow, "Allow it no longer");
  showChips("block", state.block, "Block it no longer");
  const n = state.allow.length + state.block.length;
  byId("filter-count").textContent = n ? String(n) : "";
}

function showChips(which, ids, label) {
  const chips = ids.map((id) => {
    const remove = () => change({ [which]: current()[which].filter((each) => each !== id) });
    const button = iconButton("cross", `${label}: ${nameOf(id)}`, remove, { key: id });
    return element("li", {}, nameElement(nameOf(id)), button);
  });
  replaceKeepingFocus(byId(which), chips);
}
