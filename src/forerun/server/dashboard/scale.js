// From data to pixels: round axis ends and ticks. Pure functions.

const STEPS = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];

// The smallest round number at or above value.
export function niceCeil(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = STEPS.find((s) => s * power >= value * (1 - 1e-9));
  return step * power;
}

// [low, high] that holds all values; fixed ends win over data.
export function domain(values, { low = 0, high = null, atLeast = null } = {}) {
  if (high !== null) return [low, high];
  let top = -Infinity;
  for (const value of values) if (value > top) top = value;
  if (atLeast !== null) top = Math.max(top, atLeast);
  if (!Number.isFinite(top)) top = low + 1;
  return [low, low + niceCeil(top - low)];
}

export const linear = ([low, high], [from, to]) => (value) =>
  from + ((value - low) / (high - low)) * (to - from);

const TICK_S = { 60: 20, 300: 60, 900: 180 };

// Full minutes (or 20 seconds) of local time between two moments.
export function timeTicks(from_s, to_s) {
  const step_s = TICK_S[Math.round(to_s - from_s)] ?? 60;
  const ticks = [];
  for (let t = Math.ceil(from_s / step_s) * step_s; t <= to_s; t += step_s) ticks.push(t);
  return ticks;
}
