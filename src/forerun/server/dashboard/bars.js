// Bars as real tables: the numbers are the text alternative, the bars only help the eye.

import { byId, h } from "./dom.js";
import { count, percent } from "./format.js";

// rows: [name, share 0..1, text, text]; heads: four column names, the bar's unseen.
function table(caption, heads, rows) {
  const cell = (text) => h("td", { class: "num" }, text);
  return h("table", { class: "bars" },
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, ...heads.map((head, i) =>
      i === 1 ? h("td", {}) : h("th", { scope: "col", class: i > 1 ? "num" : null }, head)))),
    h("tbody", {}, ...rows.map(([name, share, ...texts]) => {
      const bar = h("span", { class: "bar" });
      bar.style.setProperty("width", `${Math.max(0, Math.min(1, share)) * 100}%`);
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "track" }, bar), ...texts.map(cell));
    })));
}

function put(id, rows, make, empty) {
  const panel = byId(id);
  const signature = JSON.stringify(rows);
  if (panel.dataset.shown === signature) return; // a table redrawn each second cannot be read or copied
  panel.dataset.shown = signature;
  panel.querySelector(".body")?.remove();
  panel.append(h("div", { class: "body" }, rows.length ? make(rows) : h("p", { class: "empty" }, empty)));
}

export function showBars(state) {
  const offered = state.by_position?.offered ?? [];
  const accepted = state.by_position?.accepted ?? [];
  const positions = offered
    .map((n, i) => [i + 1, n > 0 ? (accepted[i] ?? 0) / n : 0, n > 0 ? percent((accepted[i] ?? 0) / n) : "–",
      `${count(accepted[i] ?? 0)} / ${count(n)}`])
    .filter((_, i) => offered[i] > 0);
  put("by-position", positions, (rows) =>
    table("Acceptance by position", ["position", "", "rate", "accepted / offered"], rows),
  "No drafts yet. Send a message with speculation on.");

  const all = state.accepted_histogram ?? [];
  const histogram = all.slice(0, all.findLastIndex((n) => n > 0) + 1); // no tail of empty bars
  const steps = histogram.reduce((sum, n) => sum + n, 0);
  const most = Math.max(...histogram, 1);
  put("histogram", steps === 0 ? [] : histogram.map((n, i) => [i, n / most, percent(n / steps), count(n)]),
    (rows) => table("Accepted per step", ["accepted", "", "share", "steps"], rows),
    "No steps yet. Send a message to fill this.");

  const reasons = Object.entries(state.idle_reasons ?? {}).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
  const idle = reasons.reduce((sum, [, n]) => sum + n, 0);
  put("idle", reasons.map(([reason, n]) => [reason.replaceAll("_", " "), n / reasons[0][1], percent(n / idle), count(n)]),
    (rows) => table("Steps without a draft", ["reason", "", "share", "steps"], rows),
    "None: each step so far had a draft, or there was no step.");
}

const SHARE = (part, whole) => (whole > 0 ? ` (${percent(part / whole)})` : "");

export function showTotals(state, uptime) {
  const t = state.totals ?? {};
  byId("uptime").textContent = `forerun ${state.version}, up for ${uptime}`;
  const pairs = {
    "Requests": count(t.requests),
    "Tokens emitted": count(t.emitted),
    "Steps": count(t.steps),
    "Steps with a draft": `${count(t.drafts)}${SHARE(t.drafts, t.steps)}`,
    "Drafted": count(t.drafted),
    "Accepted": `${count(t.accepted)}${SHARE(t.accepted, t.drafted)}`,
    "Prompt tokens": count(t.prompt_tokens),
    "From cache": `${count(t.cached_tokens)}${SHARE(t.cached_tokens, t.prompt_tokens)}`,
    "Preemptions": count(t.preemptions),
    "Fallbacks": count(t.fallbacks),
    "Rejected requests": count(t.rejected),
  };
  byId("total-list").replaceChildren(...Object.entries(pairs).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

