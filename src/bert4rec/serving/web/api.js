// The service's API. Every failure becomes one of three errors that the page can put into words.

const TIMEOUT = 30_000; // milliseconds
const TRIES = 5; // of a request that is refused because the service is busy
const KEY = "bert4rec.key";

/** The service answered, and said no. */
export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}
/** No answer at all. */
export class Unreachable extends Error {}

export const wasAborted = (error) => error?.name === "AbortError";

let tellBusy = () => {};
/** Call `listener(seconds)` when a refused request will be tried again, and with null when it was. */
export const whenBusy = (listener) => (tellBusy = listener);

let tabKey = null; // when storage is switched off the key lives as long as the page
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? tabKey;
  } catch {
    return tabKey;
  }
}
export function keepKey(value) {
  tabKey = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // Kept in `tabKey` alone.
  }
}

const queryOf = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null)).toString();

export const get = (path, values = {}, signal = null) =>
  request(`${path}?${queryOf(values)}`, { method: "GET" }, signal);

export const post = (path, body, signal = null) =>
  request(path, { method: "POST", body: JSON.stringify(body) }, signal);

/** An id as one step of a path. "." and ".." would be resolved away even when they are escaped. */
export const step = (id) => encodeURIComponent(id);

async function request(path, options, signal) {
  for (let attempt = 1; ; attempt += 1) {
    const { status, wait, content } = await once(path, options, signal);
    if (status === 503 && attempt < TRIES) {
      tellBusy(wait);
      await pause(wait * 1000, signal);
      continue;
    }
    if (attempt > 1) tellBusy(null);
    if (status >= 200 && status < 300) return content;
    const { code = "unknown", message = `the service answered with status ${status}` } = content?.error ?? {};
    throw new Refused(status, code, message);
  }
}

async function once(path, options, signal) {
  const headers = { Accept: "application/json" };
  if (options.body) headers["Content-Type"] = "application/json";
  if (key() !== null) headers.Authorization = `Bearer ${key()}`;
  const limit = AbortSignal.timeout(TIMEOUT);
  try {
    const answer = await fetch(path, {
      ...options,
      headers,
      cache: "no-store",
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    });
    const text = await answer.text();
    const seconds = Number(answer.headers.get("Retry-After"));
    const wait = Number.isFinite(seconds) ? Math.min(Math.max(seconds, 1), 30) : 1;
    return { status: answer.status, wait, content: parsed(text) };
  } catch (error) {
    if (wasAborted(error)) throw error;
    throw new Unreachable("no answer");
  }
}

/** JSON; whole numbers that JavaScript would round, such as 64-bit ids, stay text. */
function parsed(text) {
  const asText = (_, value, context) =>
    typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value)
      ? (context?.source ?? value)
      : value;
  try {
    return /[[,:\s]-?\d{16,}[\s,\]}]/.test(text) ? JSON.parse(text, asText) : JSON.parse(text);
  } catch {
    return null;
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
