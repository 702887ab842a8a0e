// Which strips stand on the time axis, in reading order: what it is worth, why, and what it costs.
//
// key: a name in the server's series. kind: line (default), stack, or threshold (good above `at`).
// plot: false keeps a number in the legend only.

import { count, ms, number, percent, times, tokensPerPass, tokensPerS } from "./format.js";

export const STRIPS = [
  {
    id: "speedup", title: "Speed-up", note: "against measured plain decoding",
    kind: "threshold", at: 1, atLeast: 1.5, format: times, tick: (v) => `${number(v)} ×`,
    series: [{ key: "speedup", label: "factor" }],
  },
  {
    id: "acceptance", title: "Draft acceptance rate", note: "accepted / drafted",
    high: 1, format: percent,
    series: [
      { key: "acceptance_rate", label: "rate" },
      { key: "steps", label: "steps", plot: false, format: count },
    ],
  },
  {
    id: "length", title: "Mean acceptance length", note: "emitted / steps",
    low: 1, atLeast: 2, format: tokensPerPass, tick: number,
    series: [{ key: "mean_acceptance_length", label: "tokens per pass" }],
  },
  {
    id: "tpot", title: "TPOT", note: "= (E2E − TTFT)/(n − 1), per request", format: ms,
    series: [
      { key: "tpot_p50_ms", label: "p50" },
      { key: "tpot_p95_ms", label: "p95" },
      { key: "tpot_p99_ms", label: "p99" },
    ],
  },
  {
    id: "ttft", title: "TTFT", note: "sending to first token", format: ms,
    series: [
      { key: "ttft_p50_ms", label: "p50" },
      { key: "ttft_p95_ms", label: "p95" },
    ],
  },
  {
    id: "e2e", title: "E2E and queue", note: "medians of whole requests", format: ms,
    series: [
      { key: "e2e_p50_ms", label: "E2E" },
      { key: "queue_p50_ms", label: "queue" },
    ],
  },
  {
    id: "step", title: "Time of a step", note: "stacked", kind: "stack", format: ms,
    series: [
      // The small ones at the bottom, where a level is easiest to read.
      { key: "draft_ms", label: "draft", look: 1 },
      { key: "host_ms", label: "host", look: 2 },
      { key: "verify_ms", label: "verify", look: 0 },
    ],
  },
  {
    id: "size", title: "Batch and draft", note: "requests per step, drafts per request", atLeast: 2,
    format: number,
    series: [
      { key: "batch_size", label: "batch size" },
      { key: "draft_length", label: "draft length" },
    ],
  },
  {
    id: "queue", title: "Requests", note: "at the end of the second", atLeast: 2, format: number,
    series: [
      { key: "running", label: "running" },
      { key: "waiting", label: "waiting" },
    ],
  },
  {
    id: "cache", title: "KV cache in use", high: 1, format: percent,
    series: [{ key: "cache_usage", label: "use" }],
  },
  {
    id: "waste", title: "Waste", note: "drafted − accepted", format: tokensPerS, tick: number,
    series: [{ key: "wasted_tokens_per_s", label: "rejected" }],
  },
];

export const ALL_SERIES = STRIPS.flatMap((strip) =>
  strip.series.map((one) => ({ format: strip.format, strip, ...one })));
