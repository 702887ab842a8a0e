// One answer on the page: its text with accepted drafts marked, and what it cost.

import { h, setText } from "./dom.js";
import { lookOf } from "./drafters.js";
import { count, ms, percent, plural, tokensPerPass, tokensPerS } from "./format.js";

// Writing each step at once would lay the page out for each step: a fast model on a busy machine
// then leaves no time for the Stop button.
const WRITE_EVERY_MS = 40;

const isText = (value) => typeof value === "string";

// vLLM's own mean leaves steps without a draft out; all passes count here, as in the charts.
const perPass = (spec) => spec.num_steps > 0
  ? spec.num_emitted_tokens / spec.num_steps : spec.mean_acceptance_length;

export class Answer {
  // around(write) runs write() and may look at the page before and after it.
  constructor(title, around = (write) => write()) {
    this.around = around;
    this.text = "";
    this.pending = [];
    this.timer = null;
    this.body = h("div", { class: "text" });
    this.figures = h("dl", { class: "figures" });
    this.note = h("p", { class: "answer-note" });
    this.tools = h("p", { class: "answer-tools" });
    // Busy while streaming: a screen reader then speaks the whole answer once, not each token.
    this.element = h("article", { class: "answer", "aria-busy": "true" },
      h("h3", {}, title), this.body, this.note, this.figures, this.tools);
  }

  // One chunk is one step: its first num_accepted pieces are the drafter's, the rest the model's.
  add(content, speculative) {
    this.text += content;
    const pieces = speculative?.pieces;
    const trusted = Array.isArray(pieces) && pieces.every(isText) && pieces.join("") === content;
    const num_accepted = trusted ? Math.min(speculative.num_accepted ?? 0, pieces.length) : 0;
    if (num_accepted <= 0) {
      this.#later(content);
      return;
    }
    const drafter = String(speculative.drafter ?? "drafter");
    const mark = h("mark", {
      class: lookOf(drafter),
      title: `${plural(num_accepted, "drafted token")} accepted (${drafter})`,
      "data-tokens": num_accepted,
    }, pieces.slice(0, num_accepted).join(""));
    this.#later(mark, pieces.slice(num_accepted).join(""));
  }

  #later(...nodes) {
    this.pending.push(...nodes);
    this.timer ??= setTimeout(() => this.#write(), WRITE_EVERY_MS);
  }

  #write() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.pending.length === 0) return;
    this.around(() => this.body.append(...this.pending));
    this.pending = [];
  }

  finish(note = "") {
    this.#write();
    this.element.setAttribute("aria-busy", "false");
    setText(this.note, note);
  }

  fail(message) {
    this.finish(message);
    this.note.classList.add("failed");
  }

  showMetrics(usage, metrics) {
    const spec = metrics?.speculative_decoding;
    const num_tokens = usage?.completion_tokens;
    const pairs = [["speed", tokensPerS(metrics?.tokens_per_second)]];
    if (spec?.num_draft_tokens > 0) {
      pairs.push(
        ["mean acceptance length", tokensPerPass(perPass(spec))],
        ["acceptance rate", percent(spec.draft_acceptance_rate)],
        ["passes saved", `${count(spec.num_accepted_draft_tokens)} of ${count(num_tokens)}`],
      );
    } else {
      pairs.push(["tokens", count(num_tokens)], ["drafts", "none"]);
    }
    pairs.push(["TTFT", ms(metrics?.time_to_first_token_ms)]);
    this.figures.replaceChildren(
      ...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }
}
