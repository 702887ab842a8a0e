// One look per drafter: a colour and a line style, so that neither alone has to tell them apart.

import { h } from "./dom.js";

const NUM_LOOKS = 5;
let order = [];

export function setDrafters(names) {
  order = names.filter((name) => name !== "none");
  return order;
}

// A class of ours, never one made from the name: names come from the server.
export function lookOf(name) {
  let at = order.indexOf(name);
  if (at < 0) at = order.push(name) - 1;
  return `look-${at % NUM_LOOKS}`;
}

export function legend() {
  const marks = order.map((name) =>
    h("span", {}, h("mark", { class: lookOf(name) }, name), " guessed, accepted"));
  return [...marks, h("span", {}, "plain: the model’s own")];
}
