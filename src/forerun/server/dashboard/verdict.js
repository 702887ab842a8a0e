// The answer in one sentence, and the six numbers behind it, over the time shown.

import { h, setText } from "./dom.js";
import { ms, percent, plural, seconds, times, tokensPerPass } from "./format.js";
import { newest } from "./strip.js";

const EVEN = 0.02; // within 2 % of plain decoding nothing is gained or lost

const known = (value) => value !== null && value !== undefined;

// Sums over the bins that have work; speed-up is weighted by the time each bin's steps took.
export function summarize(rows) {
  const sum = { steps: 0, drafted: 0, accepted: 0 };
  let plain_ms = 0;
  let spent_ms = 0;
  let length_steps = 0;
  let length_sum = 0;
  for (const row of rows) {
    for (const name of Object.keys(sum)) sum[name] += row[name] ?? 0;
    if (known(row.speedup)) {
      const step_ms = (row.draft_ms ?? 0) + (row.verify_ms ?? 0) + (row.host_ms ?? 0);
      const weight = (row.steps ?? 0) * (step_ms || 1);
      plain_ms += weight * row.speedup;
      spent_ms += weight;
    }
    if (known(row.mean_acceptance_length)) {
      length_steps += row.steps ?? 0;
      length_sum += (row.steps ?? 0) * row.mean_acceptance_length;
    }
  }
  const ratio = (top, bottom) => (bottom > 0 ? top / bottom : null);
  return {
    ...sum,
    speedup: ratio(plain_ms, spent_ms),
    acceptance_rate: ratio(sum.accepted, sum.drafted),
    mean_acceptance_length: ratio(length_sum, length_steps),
  };
}

export function judge(state, sums) {
  if (state.speculation?.enabled === false) {
    const reason = state.speculation.reason;
    return { level: "idle", text: `Speculation is off${reason ? `: ${reason}` : ""}.` };
  }
  if (sums.steps === 0) {
    return { level: "idle", text: "Nothing measured in this time. Send a message to see what speculation is worth." };
  }
  if (sums.speedup === null) {
    return { level: "idle", text: "No measured cost of plain decoding yet to compare with." };
  }
  const accepted = sums.acceptance_rate === null ? "no drafts were offered" : `${percent(sums.acceptance_rate)} of drafts accepted`;
  const behind = `over ${plural(sums.steps, "step")}, ${accepted}`;
  if (sums.speedup < 1 - EVEN) {
    return { level: "bad", text: `No: at ${times(sums.speedup)} it costs more than it saves, ${behind}.` };
  }
  if (sums.speedup <= 1 + EVEN) return { level: "warn", text: `It breaks even at ${times(sums.speedup)}, ${behind}.` };
  return { level: "good", text: `Yes: ${times(sums.speedup)} as fast as plain decoding, ${behind}.` };
}

export class Verdict {
  constructor(line, tiles) {
    this.line = line;
    this.tiles = new Map();
    const names = {
      speedup: "Speed-up", rate: "Acceptance rate", length: "Mean acceptance length",
      tpot: "TPOT p50, latest", ttft: "TTFT p50, latest", saved: "Time saved, in all",
    };
    for (const [id, name] of Object.entries(names)) {
      const value = h("dd", { "data-tile": id }, "–");
      this.tiles.set(id, value);
      tiles.append(h("div", {}, h("dt", {}, name), value));
    }
  }

  show(state, rows) {
    const sums = summarize(rows);
    const { level, text } = judge(state, sums);
    this.line.dataset.level = level;
    setText(this.line, text);
    const put = (id, value) => setText(this.tiles.get(id), value);
    put("speedup", times(sums.speedup));
    this.tiles.get("speedup").dataset.level = level;
    put("rate", percent(sums.acceptance_rate));
    put("length", tokensPerPass(sums.mean_acceptance_length));
    put("tpot", ms(newest(rows, "tpot_p50_ms")));
    put("ttft", ms(newest(rows, "ttft_p50_ms")));
    put("saved", seconds(state.totals?.saved_s));
    this.tiles.get("saved").dataset.level = state.totals?.saved_s < 0 ? "bad" : "idle";
  }
}
