// Elements from data. Text goes in as text nodes only: models, prompts and answers are not trusted.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Writes only what changed, so that live regions speak only when there is news.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
