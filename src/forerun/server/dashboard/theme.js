// The colour theme: the system's, or the one chosen here. A classic script in the head, because a
// module runs after the first paint and a chosen dark page would flash white.
(() => {
  "use strict";
  const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };
  const ORDER = Object.keys(NAMES);
  const root = document.documentElement;

  const read = () => {
    try {
      const name = localStorage.getItem("forerun-theme");
      return ORDER.includes(name) ? name : "auto";
    } catch {
      return "auto"; // storage may be forbidden; the page works without it
    }
  };
  const apply = (name) => {
    if (name === "auto") delete root.dataset.theme;
    else root.dataset.theme = name;
  };

  let current = read();
  apply(current);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      const next = ORDER[(ORDER.indexOf(current) + 1) % ORDER.length];
      button.textContent = `Theme: ${NAMES[current].toLowerCase()}`;
      button.title = `Change to ${NAMES[next].toLowerCase()}`;
    };
    button.addEventListener("click", () => {
      current = ORDER[(ORDER.indexOf(current) + 1) % ORDER.length];
      apply(current);
      try {
        localStorage.setItem("forerun-theme", current);
      } catch {
        // nothing lost but the memory of the choice
      }
      label();
    });
    label();
  });
})();
