"use strict";
// Charts, sortable tables and the label graph. All text is set by textContent: names of labels and images are untrusted.

const read = (id) => JSON.parse(document.getElementById(id).textContent);

/** Create an element; properties that start with "aria-" or "data-" and "role", "scope", "for" become attributes. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(aria-|data-|role$|scope$|for$)/.test(name)) element.setAttribute(name, value);
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
const FONT = getComputedStyle(document.documentElement).getPropertyValue("--sans").trim();
const CHART = {
  background: null,
  font: FONT,
  view: { stroke: null },
  axis: {
    labelColor: "var(--soft)", titleColor: "var(--soft)", titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 11,
    gridColor: "var(--line)", domainColor: "var(--faint)", tickColor: "var(--faint)", domain: false, tickSize: 4,
  },
  axisBand: { ticks: false, domain: false, labelPadding: 6 },
  legend: { labelColor: "var(--ink)", titleColor: "var(--soft)", orient: "bottom", columns: 3, labelLimit: 220, symbolType: "stroke", symbolStrokeWidth: 3 },
  range: { category: [1, 2, 3, 4, 5, 6, 7, 8].map((n) => `var(--c${n})`) },
};
const views = {};

/** Draw a chart; `change` may alter its specification. */
async function drawChart(place, change = (spec) => spec) {
  const spec = change({ ...read("data-" + place.id), description: place.dataset.alt });
  const options = { renderer: "svg", actions: false, ast: true, config: CHART, tooltip: { theme: "page" } };
  const drawn = await vegaEmbed(place, spec, options);
  views[place.id] = drawn.view;
}

// ------------------------------------------------------------------------------------------------------- tables
const PAGE = 100;
const SHOW = {
  text: (value) => value,
  count: (value) => value.toLocaleString("en"),
  fraction: (value) => (100 * value).toFixed(2),
  number: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)))),
};

/** Compare two cells; undefined cells are last in either direction. */
function order(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
}

function drawTable(place) {
  const { columns, rows } = read("data-" + place.id);
  let shown = rows, at = 0, by = -1, sign = 1;
  const body = make("tbody");
  const heads = columns.map(([title, kind], column) => {
    const button = make("button", { type: "button", textContent: title });
    button.addEventListener("click", () => sort(column));
    return make("th", { scope: "col", className: kind === "text" ? "" : "number" }, button);
  });
  const count = make("span", { "aria-live": "polite" });
  const back = make("button", { type: "button", textContent: "‹ previous" });
  const on = make("button", { type: "button", textContent: "next ›" });
  const search = make("input", { type: "search", placeholder: "search", "aria-label": "Search this table" });

  function fill() {
    const part = shown.slice(at, at + PAGE);
    body.replaceChildren(...part.map((row) => make("tr", {}, ...row.map((value, column) => {
      const kind = columns[column][1];
      const text = value === null ? "–" : SHOW[kind](value);
      return column ? make("td", { className: kind === "text" ? "" : "number", textContent: text })
        : make("th", { scope: "row", textContent: text });
    }))));
    const range = shown.length > PAGE ? `${(at + 1).toLocaleString("en")} to ${(at + part.length).toLocaleString("en")} of ` : "";
    count.textContent = `${range}${shown.length.toLocaleString("en")} rows`;
    back.disabled = at === 0;
    on.disabled = at + PAGE >= shown.length;
    back.hidden = on.hidden = rows.length <= PAGE;
  }
  function arrange() {
    const words = search.value.toLowerCase();
    shown = rows.filter((row) => !words || row.some((cell) => typeof cell === "string" && cell.toLowerCase().includes(words)));
    if (by >= 0) shown = [...shown].sort((a, b) => order(a[by], b[by], sign));
    at = 0;
    fill();
  }
  function sort(column) {
    const first = columns[column][1] === "text" ? 1 : -1; // numbers: largest first
    sign = by === column ? -sign : first;
    by = column;
    heads.forEach((head, k) => head.setAttribute("aria-sort", k !== by ? "none" : sign > 0 ? "ascending" : "descending"));
    arrange();
  }
  search.addEventListener("input", arrange);
  back.addEventListener("click", () => { at = Math.max(0, at - PAGE); fill(); });
  on.addEventListener("click", () => { at += PAGE; fill(); });
  search.hidden = count.hidden = rows.length <= 12;
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body);
  const tools = make("div", { className: "tools" }, make("span", { textContent: place.dataset.caption }), search, count, back, on);
  place.replaceChildren(tools, make("div", { className: "body", tabIndex: 0, role: "region", "aria-label": place.dataset.caption }, table));
  fill();
}

// -------------------------------------------------------------------------------------------------------- graph
function enliven(figure) {
  const readout = figure.querySelector(".readout"), hint = readout.textContent;
  const nodes = [...figure.querySelectorAll(".node")], edges = [...figure.querySelectorAll(".edges path")];
  const titleOf = (element) => element.querySelector("title").textContent;
  function point(chosenNodes, chosenEdges, text) {
    figure.classList.toggle("pointed", Boolean(text));
    nodes.forEach((node, k) => node.classList.toggle("on", chosenNodes.has(String(k))));
    edges.forEach((edge) => edge.classList.toggle("on", chosenEdges.has(edge)));
    readout.textContent = text || hint;
  }
  const clear = () => point(new Set(), new Set(), "");
  nodes.forEach((node) => {
    const own = edges.filter((edge) => edge.dataset.a === node.dataset.node || edge.dataset.b === node.dataset.node);
    const around = new Set([node.dataset.node, ...own.flatMap((edge) => [edge.dataset.a, edge.dataset.b])]);
    const text = titleOf(node) + (own.length ? `, ${own.length} line${own.length > 1 ? "s" : ""}` : ", no line");
    if (own.length) node.setAttribute("tabindex", "0");
    for (const event of ["pointerenter", "focus"]) node.addEventListener(event, () => point(around, new Set(own), text));
    for (const event of ["pointerleave", "blur"]) node.addEventListener(event, clear);
  });
  edges.forEach((edge) => {
    edge.addEventListener("pointerenter", () => point(new Set([edge.dataset.a, edge.dataset.b]), new Set([edge]), titleOf(edge)));
    edge.addEventListener("pointerleave", clear);
  });
}

// --------------------------------------------------------------------------------------------------------- page
function follow() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? seen.add(target.id) : seen.delete(target.id);
    let first = true;
    for (const [id, link] of links) {
      const current = first && seen.has(id);
      if (current) first = false;
      current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }
  }, { rootMargin: "0px 0px -60% 0px" });
  document.querySelectorAll("main section").forEach((section) => watcher.observe(section));
}

const widgets = {};
document.addEventListener("DOMContentLoaded", async () => {
  document.querySelectorAll(".sortable").forEach(drawTable);
  document.querySelectorAll(".graph").forEach(enliven);
  follow();
  for (const place of document.querySelectorAll("[data-widget]")) widgets[place.dataset.widget](place, read("data-" + place.id));
  for (const place of document.querySelectorAll(".plot")) await drawChart(place);
  document.documentElement.dataset.ready = "true";
  document.dispatchEvent(new Event("drawn"));
});
