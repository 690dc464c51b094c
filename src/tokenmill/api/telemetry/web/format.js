/* Numbers as text, in units that suit their size. */

const NBSP = "\u00a0";

function digits(value) {
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(value < 10 ? 2 : 1);
}

/* A count or a rate: 9999, 10.7 k, 1.25 M. */
export function num(value) {
  if (value >= 1e9) return `${digits(value / 1e9)}${NBSP}G`;
  if (value >= 1e6) return `${digits(value / 1e6)}${NBSP}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}${NBSP}k`;
  return digits(value);
}

/* [number, unit] of a time in milliseconds: 0.42 ms, 421 ms, 10.7 s, 3.5 min. */
export function timeParts(ms) {
  if (ms >= 600e3) return [digits(ms / 60e3), "min"];
  return ms >= 1000 ? [digits(ms / 1e3), "s"] : [digits(ms), "ms"];
}
export const time = (ms) => timeParts(ms).join(NBSP);
export const share = (part, whole) => whole > 0 ? part / whole : null;
export const percent = (value) => value === null ? "–" : `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)}${NBSP}%`;
export const plural = (count, name) => `${num(count)} ${name}${count === 1 ? "" : "s"}`;

export function duration(seconds) {
  const [h, m] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  if (h >= 48) return `${Math.floor(h / 24)} days`;
  return h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), units.length - 1);
  return `${digits(value / 1024 ** step)}${NBSP}${units[step]}`;
}
