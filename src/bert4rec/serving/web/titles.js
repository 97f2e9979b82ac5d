// The names of items, remembered from every answer. An id stands for an item without a title.

import { post } from "./api.js";

const titles = new Map(); // id as text → title, or null when it has none

export function remember(items) {
  for (const { item, title } of items) titles.set(String(item), title?.trim() ? title : null);
}

export const nameOf = (id) => titles.get(id) ?? id;

/** The names of ids that came with a link: one request for all of them. */
export async function learn(ids, signal) {
  const missing = [...new Set(ids)].filter((id) => !titles.has(id)).slice(0, 1000);
  if (missing.length === 0) return;
  // Without a history, and with only these items allowed, the answer is these items and their titles.
  const body = { history: [], allow: missing, k: missing.length, exclude_seen: false };
  const { items } = await post("/v1/recommend", body, signal);
  for (const id of missing) titles.set(id, null); // those that nobody knows are not asked for again
  remember(items);
}
