// Where the model looked: rows attend to columns, by layer and head.

import { post, wasAborted } from "./api.js";
import { byId, element, hint, nameElement } from "./dom.js";
import { matrixPicture } from "./matrix.js";
import { nameOf, remember } from "./titles.js";
import { weightText } from "./words.js";

const NEWEST = 25; // more rows could not be read
const MASK = "[MASK]";
const MEAN = "mean";

let controller = null;
let choice = { layer: null, head: MEAN }; // layer null: the last one
let isTableOpen = false;
let last = null; // what was answered: { names, attention }

export function startHeatMap() {
  addEventListener("bert4rec:theme", () => last && draw());
}

/** Ask for the attention behind `side`'s answers, if the panel is open and the model has any. */
export async function showAttention(state, side, model, failed) {
  controller?.abort();
  last = null;
  if (!byId("attention").open || !side) return;
  if (!model.has_attention) return say(`${model.name} has no attention to show: it is not like BERT4Rec.`);
  if (side.answer.fallback) return say("Add an item that the model knows to see where it looks.");
  if (side.answer.items.length === 0) return say("Nothing was recommended.");
  controller = new AbortController();
  const { signal } = controller;
  const items = [side.answer.items[0].item]; // any one: attention is the same for all
  const body = { history: state.history, items, attention: true, model: side.name };
  try {
    const found = await post("/v1/explain", body, signal);
    if (signal.aborted) return;
    remember(found.read);
    if (!found.attention) return say(`${side.name} gave no attention for this history.`);
    const names = found.read.map(({ item }) => nameOf(String(item)));
    last = { names: [...names, MASK], attention: found.attention };
    draw();
  } catch (error) {
    if (!wasAborted(error) && !signal.aborted) failed(error);
  }
}

function say(text) {
  byId("attention-body").replaceChildren(hint(text));
}

function draw() {
  const { names, attention } = last;
  const layer = Math.min(choice.layer ?? attention.length - 1, attention.length - 1);
  const heads = attention[layer];
  const whole = choice.head === MEAN || !heads[choice.head] ? mean(heads) : heads[choice.head];
  const from = Math.max(0, names.length - 1 - NEWEST);
  const shown = whole.slice(from).map((row) => row.slice(from));
  const cut = names.slice(from);
  const parts = [selects(attention.length, heads.length, layer), matrixPicture(shown, cut)];
  if (from > 0) {
    const rest = whole.at(-1).slice(0, from).reduce((sum, weight) => sum + weight, 0);
    const share = `${weightText(rest)} of what [MASK] looks at is older`;
    parts.push(hint(`The newest ${NEWEST} of ${names.length - 1} items; ${share}.`));
  }
  parts.push(maskTable(shown.at(-1), cut));
  byId("attention-body").replaceChildren(...parts);
}

function mean(heads) {
  const at = (i, j) => heads.reduce((sum, head) => sum + head[i][j], 0) / heads.length;
  return heads[0].map((row, i) => row.map((_, j) => at(i, j)));
}

function selects(n_layers, n_heads, layer) {
  const select = (label, options, value, take) => {
    const id = `attention-${label.toLowerCase()}`;
    const made = element("select", { id }, ...options.map(([key, text]) => element("option", { value: key }, text)));
    made.value = String(value);
    made.addEventListener("change", () => {
      take(made.value);
      draw();
      byId(id).focus(); // the one that was made anew
    });
    return element("label", { class: "field inline" }, element("span", {}, label), made);
  };
  const numbered = (n) => Array.from({ length: n }, (_, i) => [String(i + 1), String(i + 1)]);
  const layers = select(
    "Layer",
    numbered(n_layers),
    layer + 1,
    (value) => (choice = { ...choice, layer: value - 1 }),
  );
  const heads = select(
    "Head",
    [[MEAN, "mean of all"], ...numbered(n_heads)],
    choice.head === MEAN || choice.head >= n_heads ? MEAN : choice.head + 1,
    (value) => (choice = { ...choice, head: value === MEAN ? MEAN : value - 1 }),
  );
  return element("div", { class: "selects" }, layers, heads);
}

/** The row that decides the recommendations, as text: [MASK] stands for the next item. */
function maskTable(weights, names) {
  const rows = weights
    .map((weight, i) => ({ weight, name: names[i] }))
    .sort((a, b) => b.weight - a.weight)
    .map(({ weight, name }) => {
      const title = element("th", { scope: "row" }, nameElement(name));
      return element("tr", {}, title, element("td", {}, weightText(weight)));
    });
  const head = element("tr", {}, element("th", { scope: "col" }, "Item"), element("th", { scope: "col" }, "Weight"));
  return element(
    "details",
    { class: "as-table", open: isTableOpen, on: { toggle: ({ target }) => (isTableOpen = target.open) } },
    element("summary", {}, "Where [MASK] looks, as a table"),
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)),
  );
}
