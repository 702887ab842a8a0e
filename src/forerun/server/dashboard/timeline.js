// All strips on one time axis, with one cursor: pointing at any of them reads all of them.

import { byId, h, setText, svg } from "./dom.js";
import { shortTime, timeOfDay } from "./format.js";
import { timeTicks } from "./scale.js";
import { between } from "./store.js";
import { Strip } from "./strip.js";
import { STRIPS } from "./strips.js";

const AXIS_HEIGHT = 30;
const NEAR_PX = 7; // an event this close to the cursor is read with it
const JUMP_S = 10;

export class Timeline {
  constructor(store) {
    this.store = store;
    this.window_s = 300;
    this.frozen_s = null; // the right end while paused
    this.cursor_s = null;
    this.pointer_x = null; // while a pointer rests, time moves on under it
    this.strips = STRIPS.map((spec) => new Strip(spec));
    this.axis = byId("axis");
    this.root = byId("strips");
    this.root.append(...this.strips.map((strip) => strip.element));
    this.tag = h("div", { class: "cursor-tag", "aria-hidden": "true" });
    this.canvas = svg("svg", { class: "axis", height: AXIS_HEIGHT, "aria-hidden": "true" });
    this.axis.append(this.canvas, this.tag);
    new ResizeObserver(() => this.draw()).observe(this.strips[0].box);
    this.#wire();
  }

  #wire() {
    for (const box of [this.axis, ...this.strips.map((strip) => strip.box)]) {
      box.addEventListener("pointermove", (event) => {
        this.pointer_x = event.clientX - box.getBoundingClientRect().left;
        this.#follow();
      });
      box.addEventListener("pointerdown", (event) => {
        this.pointer_x = event.clientX - box.getBoundingClientRect().left;
        this.#follow();
      });
      box.addEventListener("pointerleave", (event) => {
        // A finger lifts as soon as it has pointed: its cursor stays, a mouse's goes.
        this.pointer_x = null;
        if (event.pointerType === "mouse") this.moveTo(null);
      });
    }
    this.axis.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const at_s = this.cursor_s ?? this.view.to_s - 1;
    const jump_s = event.shiftKey ? JUMP_S : 1;
    const moves = {
      ArrowLeft: at_s - jump_s, ArrowRight: at_s + jump_s,
      ArrowDown: at_s - jump_s, ArrowUp: at_s + jump_s,
      PageDown: at_s - JUMP_S, PageUp: at_s + JUMP_S,
      Home: this.view.from_s, End: this.view.to_s - 1, Escape: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.moveTo(moves[event.key]);
  }

  #follow() {
    if (this.view.width <= 0) return;
    const share = Math.min(1, Math.max(0, this.pointer_x / this.view.width));
    this.moveTo(Math.floor(this.view.from_s + share * this.window_s));
  }

  moveTo(time_s) {
    const { from_s, to_s } = this.view;
    this.cursor_s = time_s === null ? null : Math.min(to_s - 1, Math.max(from_s, Math.floor(time_s)));
    this.#read();
  }

  show(window_s) {
    this.window_s = window_s;
    this.draw();
  }

  pause(paused) {
    this.frozen_s = paused ? this.#now() : null;
    this.draw();
  }

  #now() {
    const newest_s = this.store.since ?? 0;
    return Math.max(Math.floor(this.store.state?.now_s ?? 0), newest_s) + 1;
  }

  get view() {
    const to_s = this.frozen_s ?? this.#now();
    return { from_s: to_s - this.window_s, to_s, width: Math.floor(this.strips[0].box.clientWidth) };
  }

  get rows() {
    const { from_s, to_s } = this.view;
    return between(this.store.rows, from_s, to_s);
  }

  draw() {
    const { view, rows } = this;
    byId("strips-empty").hidden = this.store.state === null || rows.some((row) => row.steps > 0);
    if (view.width <= 0 || this.store.state === null) return; // not on screen
    view.ticks = timeTicks(view.from_s, view.to_s);
    view.events = this.store.events.filter((e) => e.time_s >= view.from_s && e.time_s <= view.to_s);
    for (const strip of this.strips) {
      strip.draw(rows, view);
      strip.describe(rows);
    }
    this.#axis(view);
    if (this.pointer_x !== null) this.#follow();
    else this.moveTo(this.cursor_s < view.from_s ? null : this.cursor_s); // it left the window
  }

  #axis(view) {
    const x = (t) => ((t - view.from_s) / this.window_s) * view.width;
    const label = this.window_s <= 60 ? timeOfDay : shortTime;
    const ticks = view.ticks.filter((t) => x(t) > 8).map((t) => svg("text", {
      x: x(t), y: 12, "text-anchor": "middle",
    }, label(t)));
    const events = view.events.map((event) => svg("path", {
      class: "event-mark", d: `M${x(event.time_s)} 18l5 5l-5 5l-5 -5Z`,
    }));
    this.canvas.setAttribute("width", view.width);
    this.canvas.setAttribute("viewBox", `0 0 ${view.width} ${AXIS_HEIGHT}`);
    this.canvas.replaceChildren(...ticks, ...events);
    this.axis.setAttribute("aria-valuemin", view.from_s);
    this.axis.setAttribute("aria-valuemax", view.to_s - 1);
  }

  #read() {
    const { view, rows } = this;
    const on = this.cursor_s !== null;
    const row = on ? rows.find((one) => one.time_s === this.cursor_s) ?? {} : null;
    const at_x = on ? ((this.cursor_s + 0.5 - view.from_s) / this.window_s) * view.width : null;
    for (const strip of this.strips) strip.read(row, rows, at_x);
    const near_s = (NEAR_PX / Math.max(1, view.width)) * this.window_s;
    const events = on ? this.store.events.filter((e) => Math.abs(e.time_s - this.cursor_s - 0.5) <= near_s) : [];
    const text = on ? [timeOfDay(this.cursor_s), ...events.map((e) => e.text)].join(" · ") : "";
    setText(this.tag, text);
    this.tag.classList.toggle("on", on);
    if (on) {
      const left = Math.min(Math.max(0, view.width - this.tag.offsetWidth), Math.max(0, at_x - this.tag.offsetWidth / 2));
      this.tag.style.setProperty("left", `${left}px`);
    }
    this.axis.setAttribute("aria-valuenow", this.cursor_s ?? view.to_s - 1);
    this.axis.setAttribute("aria-valuetext", on ? `${text}. ${this.#spoken()}` : "no time chosen, showing the latest values");
  }

  #spoken() {
    const wanted = ["speedup", "acceptance", "length", "tpot"];
    return this.strips.filter((strip) => wanted.includes(strip.spec.id))
      .map((strip) => `${strip.spec.title} ${strip.values[0].textContent}`).join(", ");
  }
}
