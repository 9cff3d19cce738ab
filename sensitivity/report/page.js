"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  theme.hidden = false;
  name();

  const key = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value === undefined) return cell.textContent;
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const compare = (a, b, way) => {
    if (a === null || b === null) return (a === null) - (b === null); // what has no value stays below
    return way * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  };
  const sort = (head) => {
    const column = head.cellIndex;
    const body = head.closest("table").tBodies[0];
    const numbers = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numbers;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = Array.from(body.rows, (row) => [key(row, column), row]);
    rows.sort((one, other) => compare(one[0], other[0], down ? -1 : 1));
    body.append(...rows.map((row) => row[1]));
  };
  for (const head of document.querySelectorAll("table.sorts thead th")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sort(head));
  }
})();
