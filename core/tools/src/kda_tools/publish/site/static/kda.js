// Sorts the tables that ask for it, and opens the details of their rows. Each row is a tbody, so that its detail moves with it.
"use strict";

function sort(table, column) {
  const heads = table.tHead.rows[0].cells;
  const head = heads[column];
  const down = head.getAttribute("aria-sort") === "ascending";
  const key = (body) => body.rows[0].cells[column].dataset.order;
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    const [m, n] = [Number(x), Number(y)];
    if (!Number.isNaN(m) && !Number.isNaN(n)) return m - n;
    // What is no number stands behind all numbers.
    if (Number.isNaN(m) !== Number.isNaN(n)) return Number.isNaN(m) ? 1 : -1;
    return x.localeCompare(y, "en", { numeric: true });
  };
  const bodies = [...table.tBodies].sort((a, b) => (down ? -compare(a, b) : compare(a, b)));
  for (const other of heads) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  table.append(...bodies);
}

function show(button, open) {
  button.setAttribute("aria-expanded", String(open));
  document.getElementById(button.getAttribute("aria-controls")).hidden = !open;
}

function openLinked() {
  const button = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.querySelector(".kda-open");
  if (button) show(button, true);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table[data-kda-sortable]")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => sort(table, column));
    });
  }
  for (const button of document.querySelectorAll(".kda-open")) {
    button.addEventListener("click", () => show(button, button.getAttribute("aria-expanded") !== "true"));
  }
  openLinked();
  window.addEventListener("hashchange", openLinked);
});
