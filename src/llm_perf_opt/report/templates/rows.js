"use strict";
(function () {
  // --- large tables: the rows are data, and only some are in the page at a time ------------------------------------
  const most = 200;
  const tables = JSON.parse(document.getElementById("rows").textContent);
  function textOf(cell) { return typeof cell === "string" ? cell : cell[0]; }
  function orderOf(cell) { return typeof cell === "string" || cell[1] === null ? textOf(cell) : cell[1]; }
  function compare(one, other, down) {
    const lost = [one, other].map(function (value) { return value === "" || (typeof value === "string" && value.startsWith("n/a")); });
    if (lost[0] !== lost[1]) { return lost[0] ? 1 : -1; }
    const found = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
    return down ? -found : found;
  }
  function made(kind, text) {
    const element = document.createElement(kind);
    if (text !== undefined) { element.textContent = text; }
    return element;
  }
  // What stands between backticks is code, as in code_parts of report/text.py.
  const CODE = /(?<![\p{L}\p{N}_`])`(?=\S)([^`\n]+)(?<=\S)`(?![\p{L}\p{N}_`])/u;
  function prose(element, text) {
    text.split(CODE).forEach(function (piece, place) {
      if (piece) { element.appendChild(place % 2 ? made("code", piece) : document.createTextNode(piece)); }
    });
    return element;
  }
  function shownCell(cell, number) {
    const place = made("td");
    if (number) { place.className = "n"; }
    if (typeof cell === "string") { return prose(place, cell); }
    if (cell[2]) {
      const link = made("a", cell[0]);
      link.setAttribute("href", cell[2]); // always starts with ./
      place.appendChild(link);
    } else { prose(place, cell[0]); }
    if (cell[3]) {
      const below = prose(made("small"), cell[3]);
      below.className = "below";
      place.appendChild(below);
    }
    if (cell[4]) { place.title = cell[4]; }
    return place;
  }
  function control(label, field) {
    const box = made("label", label + " ");
    box.appendChild(field);
    return box;
  }
  function choices(rows, column) {
    const counts = new Map();
    rows.forEach(function (row) { const text = textOf(row[column]); counts.set(text, (counts.get(text) || 0) + 1); });
    return Array.from(counts).sort(function (a, b) { return compare(a[0], b[0], false); });
  }
  function setUp(id, data) {
    const table = document.getElementById(id), tools = document.querySelector('[data-rows="' + id + '"]');
    const words = data.rows.map(function (row) {
      return row.map(function (cell) { return typeof cell === "string" ? cell : [cell[0], cell[3], cell[4]].join(" "); }).join(" ").toLowerCase();
    });
    let order = data.rows.map(function (_, index) { return index; }), limit = most;
    const fields = data.facets.map(function (column) {
      const field = made("select");
      field.appendChild(new Option("all", "all"));
      choices(data.rows, column).forEach(function (choice, index) {
        const option = new Option((choice[0] || "(unknown)") + " (" + choice[1] + ")", String(index));
        option.dataset.text = choice[0];
        field.appendChild(option);
      });
      tools.appendChild(control(data.columns[column][0], field));
      return field;
    });
    const search = made("input"), count = made("span"), more = made("button", "Show more");
    search.type = "search";
    search.placeholder = "text in any cell";
    search.autocomplete = "off";
    more.type = "button";
    count.className = "count";
    count.setAttribute("aria-live", "polite");
    tools.append(control("Filter", search), count, more);
    tools.hidden = false;
    function draw() {
      const typed = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = fields.map(function (field, index) { return field.value === "all" ? null : [data.facets[index], field.selectedOptions[0].dataset.text]; }).filter(Boolean);
      const found = order.filter(function (index) {
        return chosen.every(function (pair) { return textOf(data.rows[index][pair[0]]) === pair[1]; }) &&
          typed.every(function (word) { return words[index].includes(word); });
      });
      const body = document.createDocumentFragment();
      found.slice(0, limit).forEach(function (index) {
        const line = made("tr");
        data.rows[index].forEach(function (cell, column) { line.appendChild(shownCell(cell, data.columns[column][1])); });
        body.appendChild(line);
      });
      table.tBodies[0].replaceChildren(body);
      const shown = Math.min(limit, found.length);
      count.textContent = shown + " shown of " + found.length + (found.length < data.rows.length ? " that match, " + data.rows.length + " in all" : "");
      more.hidden = shown === found.length;
    }
    function changed() { limit = most; draw(); }
    fields.forEach(function (field) { field.addEventListener("change", changed); });
    search.addEventListener("input", changed);
    more.addEventListener("click", function () { limit += 5 * most; draw(); });
    table.querySelectorAll("thead th").forEach(function (heading, column) {
      const button = made("button", heading.textContent);
      button.type = "button";
      heading.replaceChildren(button);
      heading.setAttribute("aria-sort", "none");
      button.addEventListener("click", function () {
        const before = heading.getAttribute("aria-sort");
        const down = before === "none" ? heading.classList.contains("n") : before === "ascending";
        table.querySelectorAll("th").forEach(function (other) { other.setAttribute("aria-sort", "none"); });
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        order = order.slice().sort(function (a, b) { return compare(orderOf(data.rows[a][column]), orderOf(data.rows[b][column]), down) || a - b; });
        draw();
      });
    });
    draw();
  }
  Object.keys(tables).forEach(function (id) { if (tables[id].rows.length) { setUp(id, tables[id]); } });

  // --- charts of the same kind: the selected one is shown ----------------------------------------------------------
  document.querySelectorAll(".drawings").forEach(function (box) {
    const figures = Array.from(box.querySelectorAll("figure"));
    if (figures.length < 2) { return; }
    const field = made("select"), line = made("p");
    figures.forEach(function (figure, index) { field.appendChild(new Option(figure.querySelector("figcaption").textContent, String(index))); });
    function draw() { figures.forEach(function (figure, index) { figure.hidden = String(index) !== field.value; }); }
    field.addEventListener("change", draw);
    line.className = "pick";
    line.appendChild(control(box.dataset.caption, field));
    box.prepend(line);
    draw();
  });
})();
