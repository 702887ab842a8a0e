// Asks for the state about every second; seldom while nobody looks or nobody answers.

const EVERY_MS = 1000;
const HIDDEN_MS = 15000;
const LONGEST_MS = 15000;
const TIMEOUT_MS = 10000;

export class Poll {
  // ask(signal) fetches and shows one reply; failed(error, retryMs) hears of errors.
  // failed returns false to stop until wake() (no point in asking again without a key).
  constructor(ask, failed) {
    this.ask = ask;
    this.failed = failed;
    this.failures = 0;
    this.timer = null;
    this.busy = false;
    this.again = false;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.timer !== null) this.wake();
    });
  }

  wake() {
    clearTimeout(this.timer);
    this.timer = null;
    this.failures = 0;
    if (this.busy) this.again = true; // a new key must not wait behind the old key's refusal
    else this.#once();
  }

  async #once() {
    this.busy = true;
    this.timer = null;
    let wait_ms = EVERY_MS;
    let goOn = true;
    try {
      await this.ask(AbortSignal.timeout(TIMEOUT_MS));
      this.failures = 0;
    } catch (error) {
      this.failures += 1;
      wait_ms = Math.min(LONGEST_MS, EVERY_MS * 2 ** (this.failures - 1));
      goOn = this.failed(error, wait_ms);
    }
    this.busy = false;
    if (document.hidden) wait_ms = Math.max(wait_ms, HIDDEN_MS);
    if (this.again) {
      this.again = false;
      wait_ms = 0;
      goOn = true;
    }
    if (goOn) this.timer = setTimeout(() => this.#once(), wait_ms);
  }
}
