// The history: newest first, each item with what it did to the recommendation that is looked at.

import { byId, element, nameElement, replaceKeepingFocus } from "./dom.js";
import { iconButton } from "./icons.js";
import { changeHistory } from "./state.js";
import { nameOf } from "./titles.js";
import { counted, factorText, influenceSentence, isNeutral } from "./words.js";

let wanted = null; // where the focus goes after the change that a button asked for

/** `ignored`: ids that the model does not know. */
export function showHistory(state, ignored) {
  const { history } = state;
  const rows = history.map((id, place) => row(history, id, place, ignored.has(id))).reverse();
  replaceKeepingFocus(byId("history"), rows, wanted);
  wanted = null;
  byId("history-empty").hidden = history.length > 0;
  byId("clear").hidden = history.length === 0;
  byId("history-count").textContent = history.length
    ? `${counted(history.length, "item")}${history.length > 1 ? ", newest first" : ""}`
    : "";
  const note = byId("history-note");
  note.hidden = state.user === null;
  note.replaceChildren("Stored history of ", nameElement(state.user ?? ""));
}

function row(history, id, place, isIgnored) {
  const name = nameOf(id);
  const move = (to) => () => {
    const moved = history.toSpliced(place, 1).toSpliced(to, 0, id);
    wanted = `${to}:${to > place ? "up" : "down"}`;
    changeHistory(moved);
  };
  const remove = () => changeHistory(history.toSpliced(place, 1));
  const isNewest = place === history.length - 1;
  return element(
    "li",
    { class: isIgnored ? "item ignored" : "item", "data-place": place },
    element("span", { class: "pull", "aria-hidden": "true" }),
    nameElement(name),
    element("span", { class: "influence" }, isIgnored ? "unknown" : ""),
    element(
      "span",
      { class: "actions" },
      iconButton("up", `Move ${name} up: newer`, move(place + 1), { key: `${place}:up`, isOff: isNewest }),
      iconButton("down", `Move ${name} down: older`, move(place - 1), { key: `${place}:down`, isOff: place === 0 }),
      iconButton("cross", `Remove ${name}`, remove, { key: `${place}:remove` }),
    ),
  );
}

/** Colour the history by influence: a number and an arrow say the same as the colour. */
export function showInfluences(influences) {
  const n_read = influences.filter((influence) => influence !== null).length;
  const strongest = Math.max(0.3, ...influences.map((influence) => Math.abs(influence ?? 0)));
  for (const item of byId("history").children) {
    if (item.classList.contains("ignored")) continue;
    const influence = influences[Number(item.dataset.place)] ?? null;
    const isUnread = n_read > 0 && influence === null;
    const isFlat = influence === null || isNeutral(influence);
    item.classList.toggle("unread", isUnread);
    item.classList.toggle("up", !isFlat && influence > 0);
    item.classList.toggle("down", !isFlat && influence < 0);
    item.style.setProperty("--pull", isFlat ? "0" : (Math.abs(influence) / strongest).toFixed(3));
    const [text, sentence] = isUnread
      ? ["not read", `The model reads only the newest ${counted(n_read, "item")}`]
      : influence === null
        ? ["", ""]
        : [shortText(influence), influenceSentence(influence)];
    item.querySelector(".influence").textContent = text;
    item.querySelector(".influence").title = sentence;
  }
}

const shortText = (influence) =>
  isNeutral(influence) ? "·" : `${influence > 0 ? "▲" : "▼"} ${factorText(influence)}`;
