// What the person has chosen. One object, replaced as a whole; the address always tells the same.

import { EMPTY, MAX_HISTORY, fromAddress, toAddress } from "./address.js";

let state = EMPTY;
const listeners = [];

export const current = () => state;

/** Call `listener(state)` after each change. */
export const whenChanged = (listener) => listeners.push(listener);

/** Take over some new values; the back button leads to the old ones. */
export function change(values) {
  const next = { ...state, ...values };
  next.history = next.history.slice(-MAX_HISTORY);
  const address = toAddress(next);
  if (address === toAddress(state)) return;
  state = next;
  history.pushState(null, "", address ? `#${address}` : location.pathname);
  tell();
}

/** Somebody changed the history by hand: it is no longer that of the stored user. */
export const changeHistory = (ids) => change({ history: ids, user: null });

export const addToHistory = (id) => changeHistory([...state.history, id]);

export const block = (id) =>
  change({ block: [...new Set([...state.block, id])], allow: state.allow.filter((each) => each !== id) });

export function followAddress() {
  const read = () => {
    state = fromAddress(location.hash);
    tell();
  };
  addEventListener("popstate", read);
  read();
}

function tell() {
  for (const listener of listeners) listener(state);
}
