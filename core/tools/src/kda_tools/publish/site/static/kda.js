// Sorts and filters the tables that ask for it, and shows two runs beside each other.
"use strict";

function sort(table, column, down) {
  const heads = table.tHead.rows[0].cells;
  const key = (row) => row.cells[column].dataset.order ?? row.cells[column].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    const [m, n] = [Number(x), Number(y)];
    // What is no number stands behind all numbers, whichever way they are sorted.
    if (Number.isNaN(m) !== Number.isNaN(n)) return Number.isNaN(m) ? 1 : -1;
    const order = Number.isNaN(m) ? x.localeCompare(y, "en", { numeric: true }) : m - n;
    return down ? -order : order;
  };
  const rows = [...table.tBodies[0].rows].sort(compare);
  for (const other of heads) other.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
}

function filter(form, table) {
  const asked = [...form.querySelectorAll("select")].filter((choice) => choice.value);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !asked.every((choice) => (row.dataset[choice.name] ?? "").split(" ").includes(choice.value));
    shown += row.hidden ? 0 : 1;
  }
  const words = `${shown} of ${table.tBodies[0].rows.length}`;
  form.querySelector("output").textContent = shown ? words : `${words}: no row has all of this`;
}

// What is chosen stands in the address: it can be linked to, and the way back leads to it.
function remember(name, value) {
  const asked = new URLSearchParams(location.search);
  if (value) asked.set(name, value);
  else asked.delete(name);
  history.replaceState(null, "", `${asked.size ? `?${asked}` : location.pathname}${location.hash}`);
}

// Chooses what the address says, and calls `show` now and after each choice.
function choices(form, show) {
  for (const [name, value] of new URLSearchParams(location.search)) {
    const choice = form.elements.namedItem(name);
    if (choice && [...choice.options].some((option) => option.value === value)) choice.value = value;
  }
  form.addEventListener("change", ({ target }) => {
    remember(target.name, target.value);
    show();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

function filters(tool) {
  const [form, table] = [tool.querySelector(".kda-filters"), tool.querySelector("table")];
  if (form) choices(form, () => filter(form, table));
}

function sorting(table, number) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      sort(table, column, down);
      remember("sort", `${number}.${column}.${down ? "down" : "up"}`);
    });
  });
  const [asked, column, way] = (new URLSearchParams(location.search).get("sort") ?? "").split(".");
  if (asked === String(number) && column in heads) sort(table, Number(column), way === "down");
}

// Places of the published results of two GPUs. If there is one GPU: of the newest two runs on one kind of GPU with the
// most rows in common, since a run may have a part of the rows. A part of a published result has that result's times.
function first(runs) {
  const published = [...runs.keys()].filter((place) => runs[place].published);
  if (published.length > 1) return published.slice(0, 2);
  let [before, after, most] = [0, 0, 0];
  runs.forEach((b, later) => {
    if (b.part) return;
    runs.slice(later + 1).forEach((a, place) => {
      if (a.part) return;
      const both = Object.keys(a.rows).filter((row) => row in b.rows).length * (a.gpu === b.gpu ? 1000 : 1);
      if (both > most) [before, after, most] = [later + 1 + place, later, both];
    });
  });
  return most ? [before, after] : [published[0] ?? 0, published[0] ?? 0];
}

function cell(row, text, number) {
  const made = row.insertCell();
  made.textContent = text;
  if (number) made.className = "kda-number";
}

function compare(tool) {
  const runs = JSON.parse(tool.querySelector("script").textContent);
  const form = tool.querySelector("form");
  const [a, b, clock] = ["a", "b", "clock"].map((name) => form.elements.namedItem(name));
  const clocks = new Set(runs.flatMap((run) => Object.values(run.rows).flatMap(Object.keys)));
  for (const choice of [a, b]) runs.forEach((run) => choice.add(new Option(run.name, run.id)));
  for (const name of clocks) clock.add(new Option(name));
  [a.selectedIndex, b.selectedIndex] = first(runs);
  const fill = () => {
    const [before, after] = [runs[a.selectedIndex].rows, runs[b.selectedIndex].rows];
    const body = tool.querySelector("tbody");
    body.replaceChildren();
    for (const name of new Set([...Object.keys(before), ...Object.keys(after)])) {
      const [x, y] = [before[name]?.[clock.value], after[name]?.[clock.value]];
      const row = body.insertRow();
      const head = document.createElement("th");
      head.textContent = name;
      row.append(head);
      for (const value of [x, y]) cell(row, value === undefined ? "-" : value.toFixed(2), true);
      cell(row, x && y ? (y / x).toFixed(3) : "-", true);
    }
  };
  choices(form, fill);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table[data-kda-sortable]").forEach(sorting);
  document.querySelectorAll(".kda-tool").forEach(filters);
  document.querySelectorAll(".kda-compare").forEach(compare);
});
