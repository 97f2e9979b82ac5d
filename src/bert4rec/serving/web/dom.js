// Elements made from plain values. Text goes in as text: no string of the server becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element; `on` holds listeners, other properties are attributes (false and null: left out). */
export function element(tag, { on = {}, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const [name, listener] of Object.entries(on)) made.addEventListener(name, listener);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const hint = (...children) => element("p", { class: "hint" }, ...children);

/** A name from the data, isolated so that its writing direction cannot spill over. */
export const nameElement = (name, className = "name") =>
  element("bdi", { class: className, title: name.length > 30 ? name : null }, name);

/** Put new children in; the keyboard focus stays on the element with the same `data-focus`.
 *
 * Where that one is gone, focus goes to the nearest one left, so that a keyboard user who removes
 * an item is not thrown back to the top of the page. `wanted` names another place for it.
 */
export function replaceKeepingFocus(container, children, wanted = null) {
  const active = container.contains(document.activeElement) ? document.activeElement : null;
  const places = () => [...container.querySelectorAll("[data-focus]")];
  const before = active ? places().indexOf(active) : -1;
  const key = wanted ?? active?.dataset.focus;
  container.replaceChildren(...children);
  if (!active && wanted === null) return;
  const after = places();
  const same = after.find((place) => place.dataset.focus === key);
  const next = same ?? after[Math.min(before, after.length - 1)];
  next?.focus({ preventScroll: wanted === null });
}

/** Let the children of a list slide from where they stood before `change` to where they are now. */
export function slide(container, change) {
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const children = () => [...container.querySelectorAll("[data-slide]")];
  const before = new Map(
    isCalm ? [] : children().map((child) => [child.dataset.slide, child.getBoundingClientRect().top]),
  );
  change();
  if (isCalm || before.size === 0) return;
  for (const child of children()) {
    const from = before.get(child.dataset.slide);
    const moved = from === undefined ? 0 : from - child.getBoundingClientRect().top;
    if (from === undefined) child.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 180 });
    else if (moved !== 0) {
      const frames = [{ transform: `translateY(${moved}px)` }, { transform: "none" }];
      child.animate(frames, { duration: 220, easing: "cubic-bezier(.2, .7, .2, 1)" });
    }
  }
}
