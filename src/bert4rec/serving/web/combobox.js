// A text box with a list of suggestions, as the ARIA practices describe it: the focus stays in the
// box, arrows move through the list, Enter takes one, Escape closes it.

import { wasAborted } from "./api.js";
import { element, nameElement } from "./dom.js";

const DELAY = 120; // milliseconds of quiet before a request is sent

/**
 * `find(query, signal)` gives options `{ id, name, note }`; `take(option)` is called with the chosen
 * one. The list stays open after that, so that several can be added in a row, if `staysOpen`.
 */
export function combobox(box, { find, take, nothing, failed, staysOpen = false }) {
  const input = box.querySelector("input");
  const label = input.getAttribute("aria-label");
  const list = element("ul", { role: "listbox", id: `${box.id}-list`, hidden: true, "aria-label": label });
  box.append(list);
  const fixed = {
    maxlength: 200, // the service searches for no more
    autocomplete: "off",
    spellcheck: "false",
    "aria-autocomplete": "list",
    "aria-expanded": "false",
    "aria-controls": list.id,
  };
  for (const [name, value] of Object.entries(fixed)) input.setAttribute(name, value);

  let options = [];
  let active = -1;
  let timer = null; // a request that will be sent soon
  let pending = null; // one that is on its way
  let controller = null;

  function open(isOpen) {
    list.hidden = !isOpen;
    input.setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) point(-1);
  }

  function point(index) {
    active = index;
    [...list.children].forEach((child, i) => child.setAttribute("aria-selected", String(i === index)));
    const pointed = index < 0 ? null : list.children[index];
    if (pointed) input.setAttribute("aria-activedescendant", pointed.id);
    else input.removeAttribute("aria-activedescendant");
    pointed?.scrollIntoView({ block: "nearest" });
  }

  function show(found) {
    options = found;
    list.replaceChildren(...found.map(row));
    if (found.length === 0) list.append(element("li", { class: "nothing", role: "presentation" }, nothing));
    open(true);
    point(found.length && input.value.trim() ? 0 : -1); // Enter takes the best match
  }

  function row({ name, note }, index) {
    const on = {
      pointerdown: (event) => event.preventDefault(), // the focus stays in the box
      click: () => choose(index),
      pointermove: () => active !== index && point(index),
    };
    const attributes = { role: "option", id: `${list.id}-${index}`, "aria-selected": "false", on };
    return element("li", attributes, nameElement(name), element("span", { class: "note" }, note));
  }

  function choose(index) {
    const chosen = options[index];
    input.value = "";
    options = [];
    open(false);
    if (staysOpen) ask();
    else stop(); // a late answer would open the list again, over what was chosen
    take(chosen);
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    controller?.abort();
  }

  function ask() {
    stop();
    controller = new AbortController();
    const { signal } = controller;
    const answered = answer(signal).finally(() => {
      if (pending === answered) pending = null;
    });
    pending = answered;
    return answered;
  }

  async function answer(signal) {
    try {
      const found = await find(input.value.trim(), signal);
      if (!signal.aborted && document.activeElement === input) show(found);
    } catch (error) {
      if (wasAborted(error)) return;
      open(false);
      failed(error);
    }
  }

  /** The list for what stands in the box now: somebody may type faster than answers come. */
  async function upToDate() {
    if (timer !== null || (pending === null && list.hidden)) await ask();
    else await pending;
  }

  input.addEventListener("input", () => {
    stop();
    timer = setTimeout(ask, DELAY);
  });
  input.addEventListener("focus", ask);
  input.addEventListener("blur", () => {
    stop();
    open(false);
  });
  input.addEventListener("keydown", async (event) => {
    if (event.isComposing) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const step = event.key === "ArrowDown" ? 1 : -1;
      await upToDate();
      if (options.length === 0) return;
      point(active < 0 && step < 0 ? options.length - 1 : (active + step + options.length) % options.length);
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (input.value.trim() || !list.hidden || pending !== null) await upToDate();
      if (!list.hidden && active >= 0) choose(active);
    } else if (event.key === "Escape" && !list.hidden) {
      event.preventDefault();
      open(false);
    }
  });
}
