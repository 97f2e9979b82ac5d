// Ways to begin: search, a stored user, pasted ids, or chance.

import { isId } from "./address.js";
import { get, step } from "./api.js";
import { combobox } from "./combobox.js";
import { byId } from "./dom.js";
import { itemSearch } from "./search.js";
import { addToHistory, change, changeHistory, current } from "./state.js";
import { remember } from "./titles.js";
import { counted, dayText } from "./words.js";

const SURPRISE = 5; // items in a history of chance

export function startStarters(failed) {
  itemSearch("search", { take: addToHistory, failed, staysOpen: true });
  combobox(byId("user-search"), {
    find: findUsers,
    take: ({ id }) => loadUser(id).catch(failed),
    nothing: "No stored user's id starts like this",
    failed,
  });
  disclose("show-users", "users", "input");
  disclose("show-paste", "paste", "textarea");
  byId("surprise").addEventListener("click", () => surprise().catch(failed));
  byId("clear").addEventListener("click", () => {
    changeHistory([]);
    byId("search").querySelector("input").focus();
  });
  byId("paste").addEventListener("submit", (event) => {
    event.preventDefault();
    const ids = byId("pasted").value.split(/[,;\n\t]/).map((id) => id.trim().toWellFormed()).filter(isId);
    if (ids.length) changeHistory([...current().history, ...ids]);
    byId("pasted").value = "";
  });
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, textarea, select, dialog");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || isTyping) return;
    event.preventDefault();
    byId("search").querySelector("input").focus();
  });
}

function disclose(buttonId, partId, field) {
  const button = byId(buttonId);
  button.addEventListener("click", () => {
    const part = byId(partId);
    part.hidden = !part.hidden;
    button.setAttribute("aria-expanded", String(!part.hidden));
    if (!part.hidden) part.querySelector(field).focus();
  });
}

async function findUsers(query, signal) {
  const { users } = await get("/v1/users", { query, limit: 20 }, signal);
  return users.map(({ user, n_events, last_time }) => ({
    id: user,
    name: user,
    note: [counted(n_events, "event"), dayText(last_time)].filter(Boolean).join(" · "),
  }));
}

async function loadUser(id) {
  const { events } = await get(`/v1/users/${step(id)}`);
  remember(events.filter(({ known }) => known));
  change({ history: events.map(({ item }) => String(item)), user: id });
}

async function surprise() {
  const { items } = await get("/v1/items", { query: "", limit: 100, model: current().model });
  remember(items);
  const ids = items.map(({ item }) => String(item));
  const drawn = Array.from({ length: Math.min(SURPRISE, ids.length) }, () => {
    const [id] = ids.splice(Math.floor(Math.random() * ids.length), 1);
    return id;
  });
  changeHistory(drawn);
}
