// Numbers as a person reads them.

const percent = (n) =>
  new Intl.NumberFormat("en", { style: "percent", minimumFractionDigits: n, maximumFractionDigits: n });
const [WHOLE, TENTHS, HUNDREDTHS] = [percent(0), percent(1), percent(2)];

export function probabilityText(p) {
  if (!Number.isFinite(p)) return "–";
  if (p < 0.0001) return "<0.01%";
  return (p < 0.01 ? HUNDREDTHS : p < 0.995 ? TENTHS : WHOLE).format(p);
}

export const weightText = (p) => (p < 0.0005 ? "0%" : TENTHS.format(p));

const NEUTRAL = 0.005; // log-probability: less than half a percent more or less likely

export const isNeutral = (influence) => Math.abs(influence) < NEUTRAL;

/** "×2.3": with the item 2.3 times as likely as without it; "÷1.7": so many times less likely. */
export function factorText(influence) {
  if (isNeutral(influence)) return "×1";
  const factor = Math.exp(Math.abs(influence));
  const digits = factor < 1.095 ? 2 : factor < 10 ? 1 : 0;
  const text = factor < 1000 ? factor.toFixed(digits) : "1000+";
  return `${influence > 0 ? "×" : "÷"}${text}`;
}

export function influenceSentence(influence) {
  if (isNeutral(influence)) return "makes no difference";
  const factor = factorText(influence).slice(1);
  return influence > 0 ? `pulls it up: ${factor} times as likely` : `pulls it down: ${factor} times less likely`;
}

export const counted = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** The short name of a day, for when somebody was last active. */
export const dayText = (seconds) =>
  Number.isFinite(seconds) ? new Date(seconds * 1000).toLocaleDateString("en", { dateStyle: "medium" }) : "";
