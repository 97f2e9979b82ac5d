// Before the first paint: the colours that this person chose last time, if they chose any.
// A plain script in the head, not a module: a module would run after the page was shown.
(() => {
  try {
    const chosen = localStorage.getItem("bert4rec.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage may be switched off: the system's colours do.
  }
})();
