// The page: a change of the state sends a request, and the response is shown.

import { Refused, Unreachable, get, whenBusy } from "./api.js";
import { ask, modelOf } from "./ask.js";
import { startColours } from "./colours.js";
import { byId, element } from "./dom.js";
import { showFilters, startFilters } from "./filters.js";
import { showAttention, startHeatMap } from "./heatmap.js";
import { showHistory, showInfluences } from "./history.js";
import { icon } from "./icons.js";
import { influencesByPlace } from "./influence.js";
import { askForKey } from "./key.js";
import { announce, busyText, hideProblem, problemText, showFoot, showNotes, showProblem } from "./notices.js";
import { markChosen, showRecommendations } from "./recommendations.js";
import { showSimilar, startSimilar } from "./similar.js";
import { startStarters } from "./starters.js";
import { addToHistory, block, change, current, followAddress, whenChanged } from "./state.js";
import { showWhy } from "./why.js";

const RETRY = [2, 4, 8, 15, 30]; // seconds between looks at a service that does not answer

let models = null; // the answer of /v1/model
let sides = []; // the newest answers
let shownState = current(); // the state that they belong to
let chosen = null; // { side, id } of the recommendation that was chosen
let previewed = null; // the same, of the one under the pointer or the focus
let n_failures = 0;
let retry = null;

function failed(error) {
  byId("columns").removeAttribute("aria-busy");
  if (error instanceof Refused && error.status === 401) {
    const enter = () => askForKey(error.code, begin);
    showProblem("This service needs an API key.", { label: "Enter the key", click: enter });
    return enter();
  }
  if (!(error instanceof Refused || error instanceof Unreachable)) console.error(error);
  showProblem(problemText(error), { label: "Try again", click: begin });
  if (!(error instanceof Unreachable)) return;
  clearTimeout(retry);
  retry = setTimeout(begin, 1000 * RETRY[Math.min(n_failures, RETRY.length - 1)]);
  n_failures += 1;
}

/** What is at the service, then what is in the address. Also the way back after a failure. */
async function begin() {
  clearTimeout(retry);
  try {
    models = await get("/v1/model");
  } catch (error) {
    return failed(error);
  }
  n_failures = 0;
  const order = ({ name, kind }) => (name === models.default ? 0 : kind === "popularity" ? 2 : 1);
  models.models.sort((a, b) => order(a) - order(b));
  byId("key-button").hidden = !models.needs_key;
  requestFor(current(), 0);
}

function requestFor(state, delay) {
  showModels(state);
  showFilters(state);
  showHistory(state, new Set());
  if (models === null) return;
  byId("columns").setAttribute("aria-busy", "true");
  ask({ ...state, ...known(state) }, models, { show: (found) => show(state, found), failed, delay });
}

/** The models of a state that are there: a link may name one of another day. */
function known(state) {
  const model = modelOf(models, state.model).name;
  const isThere = models.models.some(({ name }) => name === state.other && name !== model);
  return { model, other: isThere ? state.other : null };
}

function show(state, found) {
  const isNew = found[0].explanation === undefined; // shown again when the reasons are there
  hideProblem();
  [sides, shownState] = [found, state];
  byId("columns").removeAttribute("aria-busy");
  const isThere = ({ side, id }) => sides[side]?.answer.items.some(({ item }) => String(item) === id);
  if (!chosen || !isThere(chosen)) {
    const first = sides[0].answer.items[0];
    chosen = first ? { side: 0, id: String(first.item) } : null;
  }
  if (previewed && !isThere(previewed)) previewed = null;
  showFilters(state);
  showHistory(state, new Set(sides.flatMap(({ answer }) => answer.ignored.map(String))));
  showNotes(state, sides);
  showRecommendations(sides, state.history, chosen, { choose, preview, add: addToHistory, similar, block });
  showFoot(sides);
  showReasons();
  if (!isNew) return;
  announce(state, sides);
  refreshAttention();
}

/** Influences and bars of the recommendation that is looked at: previewed, else chosen. */
function showReasons() {
  const looked = previewed ?? chosen;
  const side = looked && sides[looked.side];
  const influences = side ? influencesByPlace(shownState.history, side.explanation, looked.id) : [];
  showInfluences(influences);
  showWhy(side, looked?.id ?? null, shownState.history, influences, sides.length > 1);
  markChosen(chosen, sides.length > 1 ? (looked?.id ?? null) : null);
}

function refreshAttention() {
  if (sides.length) showAttention(shownState, sides[0], modelOf(models, sides[0].name), failed);
}

function choose(which) {
  chosen = which;
  showReasons();
}

function preview(which) {
  previewed = which;
  showReasons();
}

const similar = (id, model) => showSimilar(id, model, { add: addToHistory, failed });

function showModels(state) {
  if (models === null) return;
  const option = ({ name }) => element("option", { value: name }, name);
  const { model, other } = known(state);
  const others = models.models.filter(({ name }) => name !== model);
  byId("model").replaceChildren(...models.models.map(option));
  byId("model").value = model;
  byId("other").replaceChildren(element("option", { value: "" }, "nothing"), ...others.map(option));
  byId("other").value = other ?? "";
}

function start() {
  startColours();
  startHeatMap();
  startSimilar();
  startStarters(failed);
  startFilters(failed);
  whenBusy((seconds) => (seconds === null ? hideProblem() : showProblem(busyText(seconds))));
  byId("model").addEventListener("change", ({ target }) =>
    change({ model: target.value === models.default ? null : target.value }),
  );
  byId("other").addEventListener("change", ({ target }) => change({ other: target.value || null }));
  byId("attention").addEventListener("toggle", refreshAttention);
  byId("key-button").append(icon("key"));
  byId("key-button").addEventListener("click", () => askForKey("key_missing", begin));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the part after # holds the state
    byId("recommendations").focus();
  });
  if (matchMedia("(max-width: 760px)").matches) byId("attention").open = false;
  whenChanged((state) => requestFor(state));
  followAddress();
  begin();
}

start();
