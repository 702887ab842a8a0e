// Wires the parts: one poll feeds the store, and each part shows what the store holds.

import { getState, hasKey, setKey } from "./api.js";
import { showBars, showTotals } from "./bars.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { Events } from "./events.js";
import { seconds } from "./format.js";
import { showHeader, showStatus } from "./header.js";
import { Poll } from "./poll.js";
import { Store } from "./store.js";
import { Numbers } from "./table.js";
import { Timeline } from "./timeline.js";
import { Verdict } from "./verdict.js";

const store = new Store();
const timeline = new Timeline(store);
const verdict = new Verdict(byId("verdict"), byId("tiles"));
const events = new Events((time_s) => {
  timeline.moveTo(time_s);
  byId("axis").scrollIntoView({ block: "nearest" });
});
const numbers = new Numbers();
const poll = new Poll(refresh, failed);
const chat = new Chat({ unauthorized: askForKey, answered: () => poll.wake() });

function showMeasurements() {
  if (store.state === null) return;
  timeline.draw();
  verdict.show(store.state, timeline.rows);
  numbers.show(timeline.rows);
}

async function refresh(signal) {
  store.merge(await getState(store.since, signal));
  const { state } = store;
  showHeader(state);
  chat.show(state);
  showMeasurements();
  showBars(state);
  showTotals(state, seconds(state.uptime_s));
  events.show(store.events);
}

function failed(error, retry_ms) {
  if (error.status === 401) {
    askForKey();
    return false;
  }
  showStatus(`no answer, asking again in ${Math.round(retry_ms / 1000)} s`, "bad");
  return true;
}

function askForKey() {
  showStatus("needs a key", "warn");
  const form = byId("key-form");
  if (!form.hidden) return;
  setText(form.querySelector("label"),
    hasKey() ? "The server did not accept this API key." : "This server asks for an API key.");
  form.hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  poll.wake();
});

// A group of buttons of which one is pressed.
function choose(selector, act) {
  const buttons = [...document.querySelectorAll(selector)];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      act(button.dataset);
    });
  }
}

choose("[data-window]", ({ window }) => {
  timeline.show(Number(window));
  showMeasurements();
});
choose("[data-show]", ({ show }) => {
  document.body.dataset.view = show;
});
byId("pause").addEventListener("click", ({ currentTarget }) => {
  const paused = currentTarget.getAttribute("aria-pressed") !== "true";
  currentTarget.setAttribute("aria-pressed", String(paused));
  setText(currentTarget, paused ? "Resume" : "Pause");
  timeline.pause(paused);
});
byId("numbers").addEventListener("toggle", () => numbers.show(timeline.rows));

poll.wake();
