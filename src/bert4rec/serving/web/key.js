// Asking for the API key. It is kept for this tab only, and sent to nobody but this service.

import { keepKey } from "./api.js";
import { byId, element } from "./dom.js";

/** Show the dialog; `entered()` is called when a key was given. */
export function askForKey(code, entered) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  const attributes = { type: "password", autocomplete: "off", required: true };
  const input = element("input", { ...attributes, "aria-describedby": "key-hint" });
  const wrong = code === "key_wrong" ? "That key was refused. " : "";
  const why = "This service answers only those who have a key. It is kept until you close this tab.";
  const hint = element("p", { class: "hint", id: "key-hint" }, wrong, why);
  const submit = (event) => {
    event.preventDefault();
    const value = input.value.trim();
    if (!/^[\x21-\x7e]+$/.test(value)) {
      hint.textContent = "A key is made of letters, digits and signs without spaces.";
      return;
    }
    keepKey(value);
    dialog.close();
    entered();
  };
  dialog.replaceChildren(
    element("h2", { id: "key-title" }, "API key"),
    hint,
    element(
      "form",
      { on: { submit } },
      element("label", { class: "field" }, element("span", {}, "Key"), input),
      element(
        "div",
        { class: "buttons" },
        element("button", { type: "button", class: "small", on: { click: () => dialog.close() } }, "Cancel"),
        element("button", { type: "submit", class: "small strong" }, "Use this key"),
      ),
    ),
  );
  dialog.showModal();
  input.focus();
}
