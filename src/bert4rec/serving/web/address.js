// The state as the part of the address after #, so that a link shows another person the same.

export const K_CHOICES = [5, 10, 20, 50];
export const MAX_HISTORY = 1000; // the service takes no more; the newest stay
export const MAX_ID = 1000; // characters; the service refuses a longer id

export const EMPTY = Object.freeze({
  history: [], // ids as text, oldest first
  user: null, // whose stored history this is, while nobody has changed it
  allow: [],
  block: [],
  k: 10,
  excludeSeen: true,
  model: null, // null: the service's default
  other: null, // the model beside it, if any
});

export const isId = (text) => text.length > 0 && text.length <= MAX_ID;

const joined = (ids) => ids.map(encodeURIComponent).join(",");

export function toAddress(state) {
  const parts = [];
  if (state.history.length) parts.push(`history=${joined(state.history)}`);
  if (state.user !== null) parts.push(`user=${encodeURIComponent(state.user)}`);
  if (state.allow.length) parts.push(`allow=${joined(state.allow)}`);
  if (state.block.length) parts.push(`block=${joined(state.block)}`);
  if (state.k !== EMPTY.k) parts.push(`k=${state.k}`);
  if (!state.excludeSeen) parts.push("seen=show");
  if (state.model !== null) parts.push(`model=${encodeURIComponent(state.model)}`);
  if (state.other !== null) parts.push(`with=${encodeURIComponent(state.other)}`);
  return parts.join("&");
}

/** Anything can stand in an address: what makes no sense is left out. */
export function fromAddress(text) {
  const values = new Map();
  for (const part of text.replace(/^#/, "").split("&")) {
    const cut = part.indexOf("=");
    if (cut > 0) values.set(part.slice(0, cut), part.slice(cut + 1));
  }
  const one = (name) => (values.has(name) ? decoded(values.get(name)) : null);
  const many = (name) => (values.get(name) ?? "").split(",").map(decoded).filter(isId);
  const k = Number(values.get("k"));
  return {
    history: many("history").slice(-MAX_HISTORY),
    user: one("user") || null,
    allow: [...new Set(many("allow"))].slice(0, MAX_HISTORY),
    block: [...new Set(many("block"))].slice(0, MAX_HISTORY),
    k: Number.isInteger(k) && k >= 1 && k <= 100 ? k : EMPTY.k,
    excludeSeen: values.get("seen") !== "show",
    model: one("model") || null,
    other: one("with") || null,
  };
}

function decoded(text) {
  try {
    // A lone surrogate could not be sent on as JSON; %ED%A0%80 is refused by decodeURIComponent.
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
