// The strips' numbers as a table: the text alternative to the pictures, and something to copy.

import { byId, h } from "./dom.js";
import { timeOfDay } from "./format.js";
import { ALL_SERIES } from "./strips.js";

const MOST_ROWS = 120;

export class Numbers {
  constructor() {
    this.details = byId("numbers");
    this.place = byId("table");
  }

  // Drawn only while open, newest first; without the seconds in which nothing ran.
  show(rows) {
    if (!this.details.open || this.place.matches(":hover, :focus-within")) return;
    const busy = rows.filter((row) => row.steps > 0 || row.running > 0 || row.waiting > 0);
    const shown = busy.slice(-MOST_ROWS).reverse();
    const heads = ALL_SERIES.map(({ strip, label }) => h("th", { scope: "col" }, `${strip.title}: ${label}`));
    this.place.replaceChildren(shown.length === 0
      ? h("p", { class: "empty" }, "No steps in this time.")
      : h("table", {},
        h("caption", { class: "hidden" }, `The last ${shown.length} seconds with work`),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"), ...heads)),
        h("tbody", {}, ...shown.map((row) => h("tr", {},
          h("th", { scope: "row" }, timeOfDay(row.time_s)),
          ...ALL_SERIES.map(({ key, format }) => h("td", { class: "num" }, format(row[key] ?? null))))))));
  }
}
