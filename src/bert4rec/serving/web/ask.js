// From a state to responses: soon after the last change, and the newest request wins.

import { post, wasAborted } from "./api.js";
import { learn, remember } from "./titles.js";

const QUIET = 80; // milliseconds: moving an item three places sends one request
const EXPLAINED = 100; // the service explains no more items at once

let timer = null;
let controller = null;

/**
 * Ask for `state` and call `show(sides)` with the recommendations, and again with the reasons.
 * A side is `{ name, answer, explanation, readsNothing, milliseconds }`; its explanation is
 * undefined before it came and null when there can be none.
 */
export function ask(state, models, { show, failed, delay = QUIET }) {
  clearTimeout(timer);
  controller?.abort();
  controller = new AbortController();
  const { signal } = controller;
  timer = setTimeout(async () => {
    try {
      const names = [state.model, state.other].filter((name, i) => i === 0 || name !== null);
      const [sides] = await Promise.all([
        Promise.all(names.map((name) => recommend(state, modelOf(models, name), signal))),
        learn([...state.history, ...state.allow, ...state.block], signal),
      ]);
      if (signal.aborted) return;
      show(sides);
      await Promise.all(sides.map((side) => explain(state, side, signal)));
      if (!signal.aborted) show(sides);
    } catch (error) {
      if (!wasAborted(error) && !signal.aborted) failed(error);
    }
  }, delay);
}

export const modelOf = (models, name) =>
  models.models.find((model) => model.name === (name ?? models.default)) ?? models.models[0];

async function recommend(state, model, signal) {
  const body = {
    history: state.history,
    k: state.k,
    exclude_seen: state.excludeSeen,
    allow: state.allow.length ? state.allow : null,
    block: state.block.length ? state.block : null,
    model: model.name,
  };
  const began = performance.now();
  const answer = await post("/v1/recommend", body, signal);
  remember(answer.items);
  return {
    name: model.name,
    answer,
    explanation: undefined,
    readsNothing: model.n_read === 0,
    hasVectors: model.has_vectors,
    milliseconds: performance.now() - began,
  };
}

async function explain(state, side, signal) {
  side.explanation = null;
  const items = side.answer.items.slice(0, EXPLAINED).map(({ item }) => item);
  if (side.readsNothing || side.answer.fallback || items.length === 0) return;
  const found = await post("/v1/explain", { history: state.history, items, model: side.name }, signal);
  remember(found.read);
  side.explanation = {
    read: found.read.map(({ item }) => String(item)),
    ignored: new Set(found.ignored.map(String)),
    byItem: new Map(found.explanations.map((each) => [String(each.item), each])),
  };
}
