// What happened, newest first; each entry is a button that moves the shared cursor to its moment.

import { byId, h } from "./dom.js";
import { timeOfDay } from "./format.js";

const SHOWN = 30;

export class Events {
  constructor(choose) {
    this.choose = choose;
    this.list = byId("event-list");
    this.shown = null;
  }

  show(events) {
    const newest = events.slice(-SHOWN).reverse();
    const signature = JSON.stringify(newest);
    if (signature === this.shown) return; // keeps focus and selection
    this.shown = signature;
    this.list.replaceChildren(...newest.map((event) => h("li", {},
      h("button", { type: "button", onclick: () => this.choose(event.time_s) },
        h("time", {}, timeOfDay(event.time_s)), h("span", { class: "kind" }, event.kind.replaceAll("_", " ")),
        h("span", {}, event.text)))));
    if (newest.length === 0) {
      this.list.append(h("li", { class: "empty" }, "None yet. Drift, fallbacks and changes of settings appear here."));
    }
  }
}
