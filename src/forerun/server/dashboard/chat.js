// The conversation: what is asked, how the answer streams in, and how it is stopped.

import { ApiError, errorText, openChat } from "./api.js";
import { Answer } from "./answer.js";
import { byId, h, setText } from "./dom.js";
import { legend, setDrafters } from "./drafters.js";
import { plural, times } from "./format.js";
import { readEvents } from "./sse.js";

// Prompts that show both ends: much to copy, some, next to nothing.
const EXAMPLES = {
  "Edit a text": "Repeat this text, with every “fox” replaced by “cat”:\n\nThe quick brown fox jumps over the lazy dog. The dog barks at the fox. The fox runs into the forest, and the dog runs after the fox.",
  "Write code": "Write a Python class for a two-dimensional vector with add, subtract, multiply and divide.",
  "Open prose": "Write a short story about a lighthouse keeper who finds a letter.",
};
const CLOSED = { loading: "The model is loading.", draining: "The server is shutting down." };

export class Chat {
  constructor({ unauthorized, answered }) {
    this.unauthorized = unauthorized;
    this.answered = answered;
    this.messages = [];
    this.state = null;
    this.running = null; // AbortController of the answer under way
    this.prompt = byId("prompt");
    this.log = byId("log");
    this.empty = byId("chat-empty");
    this.#wire();
  }

  #wire() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      // Enter that ends an input method's composition is not a wish to send.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    byId("settings").addEventListener("input", () => this.#summarize());
    byId("speculate").addEventListener("change", () => this.#summarize());
    byId("examples").append(...Object.entries(EXAMPLES).map(([name, text]) =>
      h("button", { type: "button", onclick: () => this.#suggest(text) }, name)));
  }

  #suggest(text) {
    this.prompt.value = text;
    this.prompt.focus();
  }

  // Fits the settings to the server; called with each reply, touches only what changed.
  show(state) {
    const first = this.state === null;
    const names = JSON.stringify(state.drafters);
    if (names !== this.names) {
      this.names = names;
      const drafters = setDrafters(state.drafters ?? []);
      const choice = byId("drafter-choice");
      const chosen = choice.value || state.drafter;
      choice.replaceChildren(...drafters.map((name) =>
        h("option", { value: name, selected: name === chosen }, name)));
      byId("legend").replaceChildren(...legend());
    }
    if (first) {
      byId("max-draft").value = state.max_draft;
      byId("max-tokens").value = Math.min(256, state.max_model_len ?? 256);
    }
    byId("max-draft").max = state.max_draft;
    if (state.max_model_len) byId("max-tokens").max = state.max_model_len;
    this.state = state;
    const possible = state.speculation?.enabled !== false && byId("drafter-choice").length > 0;
    const toggle = byId("speculate");
    if (!possible) toggle.checked = false;
    else if (toggle.disabled) toggle.checked = true; // it came back
    toggle.disabled = !possible;
    this.#summarize();
    this.#buttons();
  }

  #settings() {
    const value = (id, fallback) => {
      const field = byId(id);
      const number = field.valueAsNumber;
      return Number.isFinite(number) && field.validity.valid ? number : fallback;
    };
    return {
      temperature: value("temperature", 0),
      max_tokens: value("max-tokens", 256),
      drafter: byId("drafter-choice").value,
      max_draft: value("max-draft", this.state?.max_draft ?? 1),
      enabled: byId("speculate").checked,
    };
  }

  #summarize() {
    const { temperature, max_tokens, drafter, max_draft, enabled } = this.#settings();
    const drafts = enabled ? `${drafter}, up to ${max_draft} drafts` : "no drafts";
    setText(byId("settings-summary"),
      `temperature ${temperature} · ${plural(max_tokens, "token")} · ${drafts}`);
  }

  #buttons() {
    const closed = CLOSED[this.state?.status];
    byId("send").disabled = this.running !== null || this.state === null || Boolean(closed);
    byId("stop").disabled = this.running === null;
    this.log.querySelectorAll(".answer-tools button").forEach((button) => {
      button.disabled = this.running !== null;
    });
    if (closed && this.running === null) this.#say(closed);
  }

  #say(text) {
    setText(byId("chat-status"), text);
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(this.empty);
    this.#say("");
    this.prompt.focus();
  }

  async send() {
    const content = this.prompt.value.trim();
    if (content === "" || byId("send").disabled) return;
    const messages = [...this.messages, { role: "user", content }];
    this.prompt.value = "";
    this.empty.remove();
    const question = h("article", { class: "question" },
      h("h3", {}, "You"), h("div", { class: "text" }, content));
    this.#append(question);
    const { answer, ok, speed } = await this.#ask(messages, this.#settings(), this.state.model);
    if (!ok && answer.text === "") {
      if (this.prompt.value === "" && answer.element.isConnected) this.prompt.value = content; // nothing typed is lost
      return;
    }
    // Cleared in the meantime: the answer belongs to a conversation that is gone.
    if (answer.element.isConnected) this.messages = [...messages, { role: "assistant", content: answer.text }];
    if (ok && speed.drafted) this.#offerPlain(answer, messages, speed);
  }

  // The fairest look at what drafts are worth: the same question again without them.
  #offerPlain(answer, messages, speed) {
    const button = h("button", { type: "button" }, "Ask again without drafts");
    button.addEventListener("click", async () => {
      const settings = { ...this.#settings(), enabled: false };
      const plain = await this.#ask(messages, settings, "Without drafts");
      if (!plain.ok || !(plain.speed.tokens_per_s > 0)) return;
      button.remove();
      const same = plain.answer.text === answer.text ? "The same text" : "Another text";
      plain.answer.finish(
        `${same}; with drafts the answer ran at ${times(speed.tokens_per_s / plain.speed.tokens_per_s)} this speed.`);
    });
    this.#following(() => answer.tools.append(button));
  }

  async #ask(messages, settings, title) {
    const answer = new Answer(title, (write) => this.#following(write));
    this.#append(answer.element);
    const abort = new AbortController();
    this.running = abort;
    this.#buttons();
    this.#say("Answering …");
    const { temperature, max_tokens, ...speculative } = settings;
    let ok = false;
    let speed = {};
    try {
      const body = await openChat({
        model: this.state.model, messages, temperature, max_tokens,
        stream: true, stream_options: { include_usage: true },
        speculative: { ...speculative, mark: true },
      }, abort.signal);
      speed = await this.#stream(body, answer);
      this.#following(() => answer.finish(speed.cut ? "Cut at the token limit." : ""));
      this.#say("Answered.");
      ok = true;
    } catch (error) {
      this.#following(() => this.#explain(error, answer));
    }
    if (this.running === abort) this.running = null;
    this.#buttons();
    this.answered();
    return { answer, ok, speed };
  }

  async #stream(body, answer) {
    let speed = {};
    let cut = false;
    for await (const data of readEvents(body)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, errorText(chunk, "the answer failed"));
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) {
        answer.add(choice.delta.content, choice.speculative);
      }
      if (choice?.finish_reason === "length") cut = true;
      if (chunk.usage) {
        this.#following(() => answer.showMetrics(chunk.usage, chunk.metrics));
        speed = {
          tokens_per_s: chunk.metrics?.tokens_per_second,
          drafted: chunk.metrics?.speculative_decoding?.num_draft_tokens > 0,
        };
      }
    }
    return { ...speed, cut };
  }

  #explain(error, answer) {
    if (error.name === "AbortError") {
      answer.finish("Stopped.");
      this.#say("Stopped.");
      return;
    }
    const text = error instanceof ApiError ? error.message
      : error instanceof SyntaxError ? "The server sent something that is not JSON."
      : "The connection broke.";
    answer.fail(text);
    this.#say("No answer.");
    if (error.status === 401) this.unauthorized();
  }

  #append(element) {
    this.log.append(element);
    this.#scroll();
  }

  // Follow the text only while its end is in view: whoever scrolled up is reading.
  #atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  #following(change) {
    const follow = this.#atEnd();
    change();
    if (follow) this.#scroll();
  }

  #scroll() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}
