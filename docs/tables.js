// Tables with numbers sort by the column whose heading is clicked; a second click reverses the order.
(function () {
  "use strict";

  function value(cell) {
    const text = cell.textContent.trim().replace(/,/g, "").replace("−", "-");
    const number = /^[\[(]?([-+]?\d*\.?\d+(?:e[-+]?\d+)?)/i.exec(text);
    return number ? Number(number[1]) : text.toLowerCase();
  }

  function compare(a, b) {
    if (typeof a === typeof b) {
      return a < b ? -1 : a > b ? 1 : 0;
    }
    return typeof a === "number" ? -1 : 1; // numbers before text and dashes
  }

  function sort(table, column, descending) {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    rows.sort(function (a, b) {
      const order = compare(value(a.cells[column]), value(b.cells[column]));
      return descending ? -order : order;
    });
    body.append(...rows);
  }

  function prepare(table) {
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach(function (head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      if (!button.textContent.trim()) {
        button.setAttribute("aria-label", "Sort by name");
      }
      head.append(button);
      button.addEventListener("click", function () {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort(table, column, descending);
      });
    });
  }

  document.querySelectorAll("article table").forEach(function (table) {
    if (table.tHead && table.tBodies.length && table.querySelector("th[style*='right']")) {
      prepare(table);
    }
  });
})();
