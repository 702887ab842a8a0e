// What the page knows: one row per second, merged from replies that overlap by a bin.

export const KEEP_S = 900;
const MAX_EVENTS = 200;

export class Store {
  constructor() {
    this.rows = []; // ascending by time_s, no two alike
    this.events = [];
    this.state = null; // the last reply, without its series
  }

  // What to ask for next: the last bin again, since it may have been sent half full.
  get since() {
    return this.rows.length ? this.rows[this.rows.length - 1].time_s : null;
  }

  merge(reply) {
    const restarted = this.state && reply.uptime_s < this.state.uptime_s;
    if (restarted) {
      this.rows = [];
      this.events = [];
    }
    this.#mergeRows(reply.series ?? { time_s: [] });
    this.#mergeEvents(reply.events ?? []);
    const { series: _, ...state } = reply;
    this.state = state;
  }

  #mergeRows(series) {
    const names = Object.keys(series);
    series.time_s.forEach((time_s, i) => {
      const row = {};
      for (const name of names) row[name] = series[name][i] ?? null;
      let at = this.rows.length;
      while (at > 0 && this.rows[at - 1].time_s > time_s) at -= 1;
      if (at > 0 && this.rows[at - 1].time_s === time_s) this.rows[at - 1] = row;
      else this.rows.splice(at, 0, row);
    });
    const newest_s = this.since;
    const first = this.rows.findIndex((row) => row.time_s > newest_s - KEEP_S);
    if (first > 0) this.rows.splice(0, first);
  }

  // Replies may repeat events or send only new ones; both come out as one list.
  #mergeEvents(events) {
    const key = (event) => `${event.time_s} ${event.kind} ${event.text}`;
    const known = new Set(this.events.map(key));
    this.events.push(...events.filter((event) => !known.has(key(event))));
    this.events.sort((a, b) => a.time_s - b.time_s);
    this.events.splice(0, this.events.length - MAX_EVENTS);
  }
}

export const between = (rows, from_s, to_s) =>
  rows.filter((row) => row.time_s >= from_s && row.time_s < to_s);
