// One strip on the shared time axis: title and live numbers at the left, the plot at the right.

import { h, setText, svg } from "./dom.js";
import { number } from "./format.js";
import { domain, linear } from "./scale.js";

const HEIGHT = 66;
const PAD = 6; // room above and below, so that lines at the ends keep their width
const BEYOND = 40; // upright lines run on through taller rows, to meet those of the next strip
const HALF_S = 0.5; // a bin's point stands at its middle

const known = (value) => value !== null && value !== undefined;

export class Strip {
  constructor(spec) {
    this.spec = spec;
    this.values = spec.series.map(() => h("dd", {}, "–"));
    this.legend = h("dl", { class: "readout" }, spec.series.map((series, i) => h("div", {},
      h("dt", {}, series.plot === false ? null : swatch(spec, series, i), series.label), this.values[i])),
      spec.at === undefined ? null : h("div", {}, h("dt", {}, lineSwatch("threshold"), "break-even")));
    this.description = h("span", { class: "hidden", id: `about-${spec.id}` });
    this.canvas = svg("svg", {
      class: "plot", height: HEIGHT, role: "img",
      "aria-label": spec.title, "aria-describedby": `about-${spec.id}`,
    });
    this.cursor = svg("line", { class: "cursor", y1: -BEYOND, y2: HEIGHT + BEYOND, visibility: "hidden" });
    this.ticks = h("div", { class: "ticks", "aria-hidden": "true" });
    this.box = h("div", { class: "plot-box" }, this.canvas);
    this.element = h("figure", { class: "strip", "data-strip": spec.id },
      h("figcaption", {}, h("h3", {}, spec.title),
        spec.note ? h("p", { class: "note" }, spec.note) : null, this.legend),
      this.box, this.ticks, this.description);
  }

  draw(rows, view) {
    const { spec } = this;
    const x = linear([view.from_s, view.to_s], [0, view.width]);
    const range = this.#domain(rows);
    const y = linear(range, [HEIGHT - PAD, PAD]);
    const parts = [...view.ticks.map((t) => upright("grid", x(t)))];
    const marks = [range[0], (range[0] + range[1]) / 2, range[1]];
    for (const value of marks) parts.push(rule("grid", 0, y(value), view.width, y(value)));
    for (const event of view.events) parts.push(upright("event", x(event.time_s)));
    if (spec.kind === "stack") parts.push(...this.#stack(rows, x, y));
    else if (spec.kind === "threshold") parts.push(...this.#threshold(rows, x, y, view.width));
    else parts.push(...this.#lines(rows, x, y));
    this.canvas.setAttribute("width", view.width);
    this.canvas.setAttribute("viewBox", `0 0 ${view.width} ${HEIGHT}`);
    this.canvas.replaceChildren(...parts, this.cursor);
    // The ends, and the threshold where it has room between them.
    const { at } = spec;
    const apart = at !== undefined && Math.abs(y(at) - y(range[0])) > 11 && Math.abs(y(at) - y(range[1])) > 11;
    this.#labels(apart ? [range[0], at, range[1]] : [at ?? range[0], range[1]], y);
  }

  #domain(rows) {
    const { spec } = this;
    const plotted = spec.series.filter((series) => series.plot !== false);
    const values = spec.kind === "stack"
      ? rows.map((row) => plotted.reduce((sum, series) => sum + (row[series.key] ?? 0), 0))
      : plotted.flatMap((series) => rows.map((row) => row[series.key]).filter(known));
    return domain(values, spec);
  }

  #lines(rows, x, y) {
    return this.spec.series.map((series, i) => series.plot === false ? null
      : svg("path", { class: `line s${i}`, d: linePath(rows, series.key, x, y) })).filter(Boolean);
  }

  // Two copies of one line, clipped at the threshold: whatever is below it warns.
  #threshold(rows, x, y, width) {
    const key = this.spec.series[0].key;
    const line = linePath(rows, key, x, y);
    const at = y(this.spec.at);
    const area = areaPath(rows, x, () => at, (row) => known(row[key]) ? y(row[key]) : null);
    const clip = (name, top, bottom) => svg("clipPath", { id: `${this.spec.id}-${name}` },
      svg("rect", { x: 0, y: top, width, height: Math.max(0, bottom - top) }));
    const half = (name) => [
      svg("path", { class: `area ${name}`, d: area, "clip-path": `url(#${this.spec.id}-${name})` }),
      svg("path", { class: `line ${name}`, d: line, "clip-path": `url(#${this.spec.id}-${name})` }),
    ];
    return [clip("good", -2, at), clip("bad", at, HEIGHT + 2), ...half("good"), ...half("bad"),
      rule("threshold", 0, at, width, at)];
  }

  #stack(rows, x, y) {
    const below = new Map();
    return this.spec.series.map((series, i) => {
      const base = new Map(below);
      for (const row of rows) {
        if (known(row[series.key])) below.set(row, (below.get(row) ?? 0) + row[series.key]);
      }
      return svg("path", {
        class: `layer ${look(series, i)}`,
        d: areaPath(rows, x, (row) => y(base.get(row) ?? 0),
          (row) => known(row[series.key]) ? y(below.get(row)) : null),
      });
    });
  }

  #labels(values, y) {
    const tick = this.spec.tick ?? this.spec.format ?? number;
    const labels = values.map((value) => {
      const label = h("span", {}, withoutZeros(tick(value)));
      label.style.setProperty("top", `${y(value)}px`);
      return label;
    });
    this.ticks.replaceChildren(...labels);
  }

  // row: the bin under the cursor, or null for the newest known value of each series.
  read(row, rows, at_x) {
    const { spec } = this;
    spec.series.forEach((series, i) => {
      const value = row ? row[series.key] : newest(rows, series.key);
      setText(this.values[i], (series.format ?? spec.format)(value ?? null));
      if (spec.kind === "threshold") {
        this.values[i].classList.toggle("bad", known(value) && value < spec.at);
        this.values[i].classList.toggle("good", known(value) && value >= spec.at);
      }
    });
    this.cursor.setAttribute("visibility", at_x === null ? "hidden" : "visible");
    if (at_x === null) return;
    this.cursor.setAttribute("x1", at_x);
    this.cursor.setAttribute("x2", at_x);
  }

  // The text that stands for the picture: latest, lowest and highest of each series.
  describe(rows) {
    const parts = this.spec.series.map((series) => {
      const values = rows.map((row) => row[series.key]).filter(known);
      if (values.length === 0) return `${series.label}: nothing yet`;
      const format = series.format ?? this.spec.format;
      const low = format(Math.min(...values));
      const high = format(Math.max(...values));
      return `${series.label}: latest ${format(values[values.length - 1])}, from ${low} to ${high}`;
    });
    setText(this.description, `${this.spec.note ?? ""}. ${parts.join("; ")}.`);
  }
}

export function newest(rows, key) {
  for (let i = rows.length - 1; i >= 0; i -= 1) if (known(rows[i][key])) return rows[i][key];
  return null;
}

// 2.50 s is a measurement, 2.5 s the end of a scale.
const withoutZeros = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

const upright = (name, x) => rule(name, x, -BEYOND, x, HEIGHT + BEYOND);
const rule = (name, x1, y1, x2, y2) => svg("line", { class: name, x1, y1, x2, y2 });

const SWATCH = { class: "swatch", width: 16, height: 10, "aria-hidden": "true" };
const lineSwatch = (name) =>
  svg("svg", SWATCH, svg("line", { class: `line ${name}`, x1: 1, y1: 5, x2: 15, y2: 5 }));

const look = (series, i) => `s${series.look ?? i}`;

function swatch(spec, series, i) {
  if (spec.kind === "stack") {
    return svg("svg", SWATCH, svg("rect", { class: `layer ${look(series, i)}`, width: 12, height: 10, rx: 1 }));
  }
  return lineSwatch(spec.kind === "threshold" ? "good" : look(series, i));
}

// Runs of neighbouring bins with a value; a missing bin breaks the line instead of bridging it.
function runs(rows, valueOf) {
  const found = [];
  let last_s = null;
  for (const row of rows) {
    const value = valueOf(row);
    if (value === null || value === undefined) continue;
    if (last_s === null || row.time_s - last_s > 1.5) found.push([]);
    found[found.length - 1].push([row, value]);
    last_s = row.time_s;
  }
  return found;
}

const px = (value) => value.toFixed(1);

// "h0" gives a lonely bin a dot: round line ends draw it.
function linePath(rows, key, x, y) {
  return runs(rows, (row) => row[key]).map((run) => {
    const points = run.map(([row, value]) => `${px(x(row.time_s + HALF_S))} ${px(y(value))}`);
    return `M${points.join("L")}${points.length === 1 ? "h0" : ""}`;
  }).join("");
}

// Bars a second wide, joined, between two edges given in pixels.
function areaPath(rows, x, bottomOf, topOf) {
  return runs(rows, topOf).map((run) => {
    const edge = (heightOf) => run.flatMap(([row, top]) => {
      const level = px(heightOf(row, top));
      return [`${px(x(row.time_s))} ${level}`, `${px(x(row.time_s + 1))} ${level}`];
    });
    const top = edge((_, value) => value);
    const bottom = edge((row) => bottomOf(row)).reverse();
    return `M${top.join("L")}L${bottom.join("L")}Z`;
  }).join("");
}
