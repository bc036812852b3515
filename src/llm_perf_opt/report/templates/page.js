"use strict";
(function () {
  // --- tables: sorting by a button in each heading, filtering by a text field -------------------------------------
  function orderOf(cell) {
    if (cell.dataset.order !== undefined) { return Number(cell.dataset.order); }
    return cell.textContent.trim();
  }
  // Missing values come last in both directions.
  function compare(one, other, down) {
    const lost = [one, other].map(function (value) { return typeof value === "string" && value.startsWith("n/a"); });
    if (lost[0] !== lost[1]) { return lost[0] ? 1 : -1; }
    const found = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
    return down ? -found : found;
  }
  function sortBy(table, heading, index) {
    const down = heading.getAttribute("aria-sort") === "none" ? heading.classList.contains("n") : heading.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach(function (other) { other.setAttribute("aria-sort", "none"); });
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).map(function (row, place) { return { row: row, place: place, value: orderOf(row.cells[index]) }; });
    rows.sort(function (a, b) { return compare(a.value, b.value, down) || a.place - b.place; });
    rows.forEach(function (entry) { body.appendChild(entry.row); });
  }
  function filterRows(table, text, count) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    const rows = Array.from(table.tBodies[0].rows);
    rows.forEach(function (row) {
      const whole = Array.from(row.cells).map(function (cell) { return cell.textContent + " " + (cell.title || ""); }).join(" ").toLowerCase();
      row.hidden = !words.every(function (word) { return whole.includes(word); });
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = words.length ? shown + " of " + rows.length + " rows" : "";
  }
  document.querySelectorAll("table.tools").forEach(function (table) {
    table.querySelectorAll("thead th").forEach(function (heading, index) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      heading.textContent = "";
      heading.appendChild(button);
      heading.setAttribute("aria-sort", "none");
      button.addEventListener("click", function () { sortBy(table, heading, index); });
    });
  });
  document.querySelectorAll("input[data-for]").forEach(function (field) {
    const table = document.getElementById(field.dataset.for);
    const count = field.closest("p").querySelector(".count");
    field.addEventListener("input", function () { filterRows(table, field.value, count); });
  });

  // --- commands: a button that copies them ----------------------------------------------------------------------
  function copied(button, text) {
    button.textContent = text;
    window.setTimeout(function () { button.textContent = "Copy"; }, 1500);
  }
  function copySelected(code) {
    const range = document.createRange();
    range.selectNodeContents(code);
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    return document.execCommand("copy");
  }
  document.querySelectorAll(".command").forEach(function (box) {
    const code = box.querySelector("code"), button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy the command");
    button.setAttribute("aria-live", "polite");
    box.appendChild(button);
    button.addEventListener("click", function () {
      // The clipboard may be refused to a page opened from disk; then the command is selected and copied the old way.
      const written = navigator.clipboard ? navigator.clipboard.writeText(code.textContent) : Promise.reject();
      written.then(function () { copied(button, "Copied"); }, function () { copied(button, copySelected(code) ? "Copied" : "Selected"); });
    });
  });
  // On paper, what is folded is shown.
  let opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.from(document.querySelectorAll("details:not([open])"));
    opened.forEach(function (box) { box.open = true; });
  });
  window.addEventListener("afterprint", function () { opened.forEach(function (box) { box.open = false; }); });

  // --- charts ------------------------------------------------------------------------------------------------------
  const figures = JSON.parse(document.getElementById("charts").textContent);
  const names = Object.keys(figures);
  if (!names.length || typeof Plotly === "undefined") { document.body.dataset.ready = "yes"; return; }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function themed(layout, light) {
    const css = getComputedStyle(document.documentElement);
    function color(name, printed) { return light ? printed : css.getPropertyValue(name).trim(); }
    const text = color("--text", "#000000"), grid = color("--grid", "#dddddd"), ground = color("--ground", "#ffffff");
    const made = Object.assign({ margin: { l: 70, r: 20, t: 10, b: 50 } }, layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { color: text, family: "system-ui, sans-serif", size: 13 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--faint", "#444444"), activecolor: text },
      hoverlabel: { bgcolor: ground, bordercolor: text, font: { color: text }, align: "left", namelength: -1 }
    });
    Object.keys(made).filter(function (key) { return /^[xy]axis/.test(key); }).forEach(function (key) {
      made[key] = Object.assign({ automargin: true, exponentformat: "none", separatethousands: true }, made[key], { gridcolor: grid, zerolinecolor: grid, linecolor: grid });
    });
    return made;
  }
  // The buttons are listed explicitly: by default, one of them sends the chart to a server.
  const config = {
    responsive: true, displaylogo: false, plotlyServerURL: "", displayModeBar: "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]]
  };
  function draw(light) {
    return Promise.all(names.map(function (name) {
      const place = document.getElementById(name);
      if (!place.classList.contains("js-plotly-plot")) { place.textContent = ""; }
      return Plotly.react(place, figures[name].data, themed(figures[name].layout, light), config);
    }));
  }
  dark.addEventListener("change", function () { draw(false); });
  window.addEventListener("beforeprint", function () { draw(true); });
  window.addEventListener("afterprint", function () { draw(false); });
  draw(false).then(function () { document.body.dataset.ready = "yes"; });
})();
