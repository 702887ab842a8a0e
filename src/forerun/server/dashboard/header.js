// The top of the page: what is served, how it is, and what deserves attention.

import { byId, h, setText } from "./dom.js";

const LEVELS = { ready: "good", loading: "warn", draining: "warn", stuck: "bad" };
const WORDS = { warn: "Warning", bad: "Problem" };

let shown = null;

export function showHeader(state) {
  setText(byId("model"), state.model);
  setText(byId("drafter"), state.drafter === "none" ? "none" : `${state.drafter}, up to ${state.max_draft}`);
  setText(byId("machine"), state.machine);
  document.title = `${state.model} · forerun`;
  showStatus(state.status, LEVELS[state.status] ?? "warn");
  showHealth(state);
}

export function showStatus(text, level) {
  const status = byId("status");
  setText(status, text);
  status.dataset.level = level;
}

// Only what is wrong: "all fine" in a banner would teach people to look past it.
function showHealth(state) {
  const items = (state.health ?? []).filter(({ level }) => level === "warn" || level === "bad");
  if (state.speculation?.enabled === false) {
    items.push({ level: "warn", text: `Speculation is off: ${state.speculation.reason ?? "no reason given"}` });
  }
  const signature = JSON.stringify(items);
  if (signature === shown) return;
  shown = signature;
  byId("health").replaceChildren(...items.map(({ level, text }) =>
    h("li", { class: "notice", "data-level": level }, h("strong", {}, WORDS[level]), text)));
}
