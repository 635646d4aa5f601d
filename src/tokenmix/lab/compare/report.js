// The page reads without this; it adds sorting by a column and hiding a variant in the charts.
for (const head of document.querySelectorAll("thead th[data-sort]")) {
  head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending";
    const body = head.closest("table").tBodies[0];
    const number = (row) => {
      const value = parseFloat(row.cells[head.cellIndex]?.dataset.value);
      return Number.isNaN(value) ? (up ? Infinity : -Infinity) : value;
    };
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...[...body.rows].sort((a, b) => (up ? number(a) - number(b) : number(b) - number(a))));
  });
}
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "false";
    const { index } = button.dataset;
    for (const twin of document.querySelectorAll(`.legend button[data-index="${index}"]`)) twin.setAttribute("aria-pressed", shown);
    for (const line of document.querySelectorAll(`.chart .t${index}`)) line.classList.toggle("off", !shown);
  });
}
// Everything is printed, also what is folded.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
