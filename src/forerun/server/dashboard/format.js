// Numbers as people read them: a unit, and no more digits than the number deserves.

const NONE = "–";
const missing = (value) => value === null || value === undefined || !Number.isFinite(value);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en", {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
const shortClock = new Intl.DateTimeFormat("en", {
  hour: "2-digit", minute: "2-digit", hourCycle: "h23",
});

// Three significant digits, without trailing noise: 0.42, 4.2, 42, 420.
function digits(value) {
  const size = Math.abs(value);
  if (size >= 100) return grouped.format(value);
  if (size >= 10) return value.toFixed(1);
  return size === 0 ? "0" : value.toFixed(2);
}

// Without trailing zeros: for counts that may be means.
const trimmed = (value) =>
  Math.abs(value) >= 100 ? grouped.format(value) : String(Number(value.toPrecision(3)));

export const count = (value) => (missing(value) ? NONE : grouped.format(value));
export const number = (value) => (missing(value) ? NONE : trimmed(value));
export const times = (value) => (missing(value) ? NONE : `${value.toFixed(2)} ×`);
export const tokensPerS = (value) => (missing(value) ? NONE : `${digits(value)} tokens/s`);
export const tokensPerPass = (value) => (missing(value) ? NONE : value.toFixed(2));

export function percent(value) {
  if (missing(value)) return NONE;
  const hundredths = value * 100;
  const fine = hundredths > 0 && hundredths < 10;
  return `${fine ? hundredths.toFixed(1) : Math.round(hundredths)} %`;
}

export function ms(value) {
  if (missing(value)) return NONE;
  return value >= 1000 ? `${digits(value / 1000)} s` : `${digits(value)} ms`;
}

export function seconds(value) {
  if (missing(value)) return NONE;
  if (value === 0) return "0 s";
  if (Math.abs(value) < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(Math.abs(value)); // before it is split: never "1 min 60 s"
  const sign = value < 0 ? "-" : "";
  if (whole < 60) return `${sign}${whole} s`;
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(whole / 60);
  return `${sign}${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const timeOfDay = (unix_s) => clock.format(new Date(unix_s * 1000));
export const shortTime = (unix_s) => shortClock.format(new Date(unix_s * 1000));
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
