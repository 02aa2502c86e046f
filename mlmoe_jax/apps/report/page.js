"use strict";
// Charts and tables. All text is set by textContent: names of labels and images are untrusted.

const read = (id) => JSON.parse(document.getElementById(id).textContent);

/** Create an element; properties that start with "aria-" or "data-" and "role", "scope" become attributes. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(aria-|data-|role$|scope$)/.test(name)) element.setAttribute(name, value);
    else if (name === "style") element.style.cssText = value;
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const labeled = (text, control) => make("label", {}, text, control);
const inPercent = (value, digits = 1) => (100 * value).toFixed(digits) + "\u00a0%";

/** A <select> of [value, text] pairs. */
function choice(pairs, onchange) {
  const select = make("select", {}, ...pairs.map(([value, text]) => make("option", { value, textContent: text })));
  select.addEventListener("change", () => onchange(select.value));
  return select;
}

// ------------------------------------------------------------------------------------------------------- charts
const CHART = {
  background: null,
  font: getComputedStyle(document.documentElement).getPropertyValue("--sans").trim(),
  view: { stroke: null },
  axis: {
    labelColor: "var(--soft)", titleColor: "var(--soft)", titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 11,
    gridColor: "var(--line)", domainColor: "var(--faint)", tickColor: "var(--faint)", domain: false, tickSize: 4,
  },
  axisBand: { ticks: false, domain: false, labelPadding: 6 },
  legend: { labelColor: "var(--ink)", orient: "bottom", columns: 3, labelLimit: 220, symbolType: "stroke", symbolStrokeWidth: 3 },
  range: { category: [1, 2, 3, 4, 5, 6, 7, 8].map((n) => `var(--c${n})`) },
};

async function drawChart(place) {
  const spec = { ...read("data-" + place.id), description: place.dataset.alt };
  const options = { renderer: "svg", actions: false, ast: true, config: CHART, tooltip: { theme: "page" } };
  await vegaEmbed(place, spec, options);
}

// ------------------------------------------------------------------------------------------------------- tables
const MOST = 100, SEARCHED = 12; // rows that are shown at first; rows from which a table can be searched
const SHOW = {
  text: (value) => value,
  term: ([name, meaning]) => make("span", {}, name, make("small", { textContent: meaning })),
  count: (value) => value.toLocaleString("en"),
  fraction: (value) => (100 * value).toFixed(2),
  difference: (value) => (value < 0 ? "−" : "+") + Math.abs(100 * value).toFixed(2),
  number: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)))),
};
const isText = (kind) => kind === "text" || kind === "term";

/** Compare two cells; undefined cells are last in either direction. */
function order(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
}

function drawTable(place) {
  const { columns: given, rows } = read("data-" + place.id);
  const columns = given.map((column) => (typeof column === "string" ? [column, "text"] : column));
  let shown = rows, most = MOST, by = -1, sign = 1;
  const body = make("tbody");
  const heads = columns.map(([title, kind], column) => {
    const button = make("button", { type: "button", textContent: title });
    button.addEventListener("click", () => sort(column));
    return make("th", { scope: "col", className: isText(kind) ? "" : "number" }, button);
  });
  const count = make("span", { "aria-live": "polite" });
  const all = make("button", { type: "button", textContent: "show all" });
  all.addEventListener("click", () => { most = Infinity; fill(); });
  const search = make("input", { type: "search", placeholder: "search", "aria-label": "Search this table" });

  function fill() {
    body.replaceChildren(...shown.slice(0, most).map((row) => make("tr", {}, ...row.map((value, column) => {
      const kind = columns[column][1], cell = value === null ? "–" : SHOW[kind](value);
      return make(column ? "td" : "th", column ? { className: isText(kind) ? "" : "number" } : { scope: "row" }, cell);
    }))));
    all.hidden = shown.length <= most;
    count.textContent = `${all.hidden ? "" : `${most} of `}${shown.length.toLocaleString("en")} rows`;
  }
  function arrange() {
    const words = search.value.toLowerCase();
    shown = rows.filter((row) => !words || row.some((cell) => typeof cell === "string" && cell.toLowerCase().includes(words)));
    if (by >= 0) shown = [...shown].sort((a, b) => order(a[by], b[by], sign));
    fill();
  }
  function sort(column) {
    sign = by === column ? -sign : isText(columns[column][1]) ? 1 : -1; // numbers: largest first
    by = column;
    heads.forEach((head, k) => head.setAttribute("aria-sort", k !== by ? "none" : sign > 0 ? "ascending" : "descending"));
    arrange();
  }
  search.addEventListener("input", arrange);
  const caption = place.dataset.caption ? make("caption", { textContent: place.dataset.caption }) : null;
  const head = columns.some(([title]) => title) ? make("thead", {}, make("tr", {}, ...heads)) : null;
  if (!head) place.classList.add("facts");
  if (rows.length > SEARCHED) place.classList.add("long");
  const tools = rows.length > SEARCHED && head ? make("div", { className: "tools" }, search, count, all) : null;
  const scroll = { className: "scroll", tabIndex: 0, role: "region", "aria-label": place.dataset.caption || place.id };
  place.append(...[tools, make("div", scroll, make("table", {}, ...[caption, head, body].filter(Boolean)))].filter(Boolean));
  fill();
}

// --------------------------------------------------------------------------------------------------------- page
const widgets = {};
document.addEventListener("DOMContentLoaded", async () => {
  document.querySelectorAll(".table").forEach(drawTable);
  for (const place of document.querySelectorAll(".widget")) widgets[place.dataset.draw](place, read("data-" + place.id));
  for (const place of document.querySelectorAll(".plot")) await drawChart(place);
  document.documentElement.dataset.ready = "true";
});
