// A square matrix of weights as a picture that can be read with a pointer or with arrow keys.

import { element, nameElement } from "./dom.js";
import { weightText } from "./words.js";

const between = (least, value, most) => Math.max(least, Math.min(most, Math.floor(value)));

export function matrixPicture(weights, names) {
  const n = weights.length;
  const cell = { width: between(4, 164 / n, 18), height: between(12, 230 / n, 18) }; // room for a label
  const canvas = element("canvas", { tabindex: "0", role: "img" });
  const strongest = weights.at(-1).indexOf(Math.max(...weights.at(-1)));
  const most = weightText(weights.at(-1)[strongest]);
  const summary = `[MASK], the next item, looks most at ${names[strongest]}: ${most}.`;
  canvas.setAttribute("aria-label", `Attention, ${n} by ${n}. ${summary} Arrow keys read single cells.`);
  const readout = element("p", { class: "readout", "aria-live": "polite" }, summary);
  let cursor = null; // [row, column] that is read out

  function point(row, column) {
    cursor = [row, column];
    paint(canvas, weights, cell, cursor);
    const weight = `: ${weightText(weights[row][column])}`;
    readout.replaceChildren(nameElement(names[row]), " looks at ", nameElement(names[column]), weight);
  }
  function leave() {
    cursor = null;
    paint(canvas, weights, cell, cursor);
    readout.textContent = summary;
  }

  canvas.addEventListener("pointermove", (event) => {
    const row = between(0, event.offsetY / cell.height, n - 1);
    const column = between(0, event.offsetX / cell.width, n - 1);
    if (cursor?.[0] !== row || cursor?.[1] !== column) point(row, column);
  });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = cursor ?? [n - 1, strongest];
    if (cursor) point(between(0, row + step[0], n - 1), between(0, column + step[1], n - 1));
    else point(row, column);
  });

  const labels = names.map((name) => {
    const label = element("li", {}, nameElement(name));
    label.style.height = `${cell.height}px`;
    label.style.fontSize = `${between(10, cell.height - 2, 12)}px`;
    return label;
  });
  labels.at(-1).classList.add("mask");
  paint(canvas, weights, cell, cursor);
  return element(
    "figure",
    { class: "matrix" },
    element("div", { class: "matrix-body" }, element("ol", { "aria-hidden": "true" }, ...labels), canvas),
    element("figcaption", {}, readout),
  );
}

function paint(canvas, weights, cell, cursor) {
  const n = weights.length;
  const scale = globalThis.devicePixelRatio || 1;
  const [width, height] = [n * cell.width, n * cell.height];
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const colours = getComputedStyle(document.documentElement);
  const top = Math.max(...weights.flat(), Number.EPSILON);
  pen.fillStyle = colours.getPropertyValue("--sunken").trim();
  pen.fillRect(0, 0, width, height);
  pen.fillStyle = colours.getPropertyValue("--accent").trim();
  const gap = 1; // between cells
  const at = (row, column) => [column * cell.width, row * cell.height, cell.width - gap, cell.height - gap];
  weights.forEach((row, i) =>
    row.forEach((weight, j) => {
      pen.globalAlpha = Math.sqrt(weight / top); // small weights would all look like none
      pen.fillRect(...at(i, j));
    }),
  );
  pen.globalAlpha = 1;
  if (!cursor) return;
  pen.strokeStyle = colours.getPropertyValue("--text").trim();
  pen.lineWidth = 1.5;
  pen.strokeRect(...at(...cursor));
}
