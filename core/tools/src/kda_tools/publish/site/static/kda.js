// Sorts and filters the tables that ask for it, and shows two runs beside each other.
"use strict";

function sort(table, column) {
  const heads = table.tHead.rows[0].cells;
  const head = heads[column];
  const down = head.getAttribute("aria-sort") === "ascending";
  const key = (row) => row.cells[column].dataset.order ?? row.cells[column].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    const [m, n] = [Number(x), Number(y)];
    if (!Number.isNaN(m) && !Number.isNaN(n)) return m - n;
    // What is no number stands behind all numbers.
    if (Number.isNaN(m) !== Number.isNaN(n)) return Number.isNaN(m) ? 1 : -1;
    return x.localeCompare(y, "en", { numeric: true });
  };
  const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? -compare(a, b) : compare(a, b)));
  for (const other of heads) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
}

function filter(form, table) {
  const asked = [...form.querySelectorAll("select")].filter((choice) => choice.value);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !asked.every((choice) => (row.dataset[choice.name] ?? "").split(" ").includes(choice.value));
    shown += row.hidden ? 0 : 1;
  }
  form.querySelector("output").textContent = `${shown} of ${table.tBodies[0].rows.length}`;
}

// What is chosen stands in the address, so that a filtered table can be linked to.
function remember(form) {
  const asked = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  history.replaceState(null, "", `${asked.size ? `?${asked}` : location.pathname}${location.hash}`);
}

function filters(tool) {
  const [form, table] = [tool.querySelector(".kda-filters"), tool.querySelector("table")];
  if (!form) return;
  for (const [name, value] of new URLSearchParams(location.search)) {
    const choice = form.elements.namedItem(name);
    if (choice && [...choice.options].some((option) => option.value === value)) choice.value = value;
  }
  form.addEventListener("change", () => {
    filter(form, table);
    remember(form);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  filter(form, table);
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
  for (const choice of [a, b]) runs.forEach((run, place) => choice.add(new Option(run.name, place)));
  for (const name of clocks) clock.add(new Option(name));
  a.value = Math.min(1, runs.length - 1);
  b.value = 0;
  const fill = () => {
    const [before, after] = [runs[a.value].rows, runs[b.value].rows];
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
  form.addEventListener("change", fill);
  form.addEventListener("submit", (event) => event.preventDefault());
  fill();
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table[data-kda-sortable]")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => sort(table, column));
    });
  }
  document.querySelectorAll(".kda-tool").forEach(filters);
  document.querySelectorAll(".kda-compare").forEach(compare);
});
