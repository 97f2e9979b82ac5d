// What a person is told: problems, notes beside the answers, and news for a screen reader.

import { Refused, Unreachable } from "./api.js";
import { byId, element, nameElement } from "./dom.js";
import { nameOf } from "./titles.js";
import { counted, probabilityText } from "./words.js";

const LISTED = 8; // ignored ids that are named

export function showProblem(text, action = null) {
  const place = byId("problem");
  place.replaceChildren(element("span", {}, text));
  if (action) {
    const attributes = { type: "button", class: "small", on: { click: action.click } };
    place.append(element("button", attributes, action.label));
  }
  place.hidden = false;
}

export function hideProblem() {
  byId("problem").hidden = true;
  byId("problem").replaceChildren();
}

/** What went wrong, in a sentence. */
export function problemText(error) {
  if (error instanceof Unreachable) return "The service does not answer. Is it still running? Trying again …";
  if (!(error instanceof Refused)) return `Something went wrong in this page: ${error.message}`;
  if (error.status === 503) return "The service is busy and gave up for now.";
  if (error.status === 403) return `This key may not do that: ${error.message}`;
  return `The service refused: ${error.message}`;
}

export const busyText = (seconds) => `The service is busy: trying again in ${counted(seconds, "second")} …`;

/** Notes above the answers: nothing known, ids that were left out. */
export function showNotes(state, sides) {
  const notes = [];
  if (sides.some(({ answer }) => answer.fallback)) {
    const why = state.history.length ? "Nothing in this history is known" : "The history is empty";
    notes.push(element("p", { class: "note-line" }, `${why}: these are popular items.`));
  }
  const ignored = [...new Set(sides.flatMap(({ answer }) => answer.ignored.map(String)))];
  if (ignored.length) {
    const names = ignored.slice(0, LISTED).flatMap((id, i) => [i ? ", " : "", nameElement(id, "name id")]);
    const rest = ignored.length > LISTED ? ` and ${ignored.length - LISTED} more` : "";
    const who = sides.length > 1 ? "one of the models does" : "the model does";
    notes.push(element("p", { class: "note-line" }, `Left out, because ${who} not know them: `, ...names, rest));
  }
  byId("notes").replaceChildren(...notes);
}

export function announce(state, sides) {
  const best = sides[0].answer.items[0];
  const count = counted(sides[0].answer.items.length, "recommendation");
  const first = best ? `, first ${nameOf(String(best.item))}, ${probabilityText(best.probability)}` : "";
  byId("live").textContent = `${count} for ${counted(state.history.length, "item")}${first}.`;
}

export function showFoot(sides) {
  const versions = sides.map(({ answer }) => `${answer.model} ${answer.model_version}`);
  byId("version").textContent = `Model ${versions.join(" · ")}`;
  const slowest = Math.max(1, ...sides.map((side) => side.milliseconds));
  byId("latency").textContent = `Answered in ${Math.round(slowest)} ms`;
}
