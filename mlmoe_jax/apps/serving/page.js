// The page of the server: images in, labels with thresholds, gates and attention out.
"use strict";

const SHOWN = 12; // labels that are listed unless all are wanted
const at = (id) => document.getElementById(id);
const percent = (value) => `${(100 * value).toFixed(value > 0.0995 ? 0 : 1)} %`;
let model = null, images = [], current = 0, label = null, map = null, query = 0, strength = 0.8;

function make(tag, properties = {}, ...children) {
  const { data, ...plain } = properties, element = Object.assign(document.createElement(tag), plain);
  for (const [name, value] of Object.entries(data ?? {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function say(text, error = false) {
  at("state").textContent = text;
  at("state").classList.toggle("error", error);
}

// ------------------------------------------------------------------------------------------------------- images in
async function send(file) {
  const form = new FormData();
  form.append("images", file, file.name || "pasted image");
  const answer = await fetch(`/predict?attention=true&gates=${Object.keys(model.gates).length > 0}`, { method: "POST", body: form });
  const body = await answer.json().catch(() => ({ error: `the server answered with status ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error);
  return body.results[0];
}

async function take(files) {
  const given = [...files];
  if (!given.length) return say("This is not a file.", true);
  if (!model) return say("The server does not answer; load the page again.", true);
  const found = [], errors = [];
  for (const [number, file] of given.entries()) {
    say(given.length > 1 ? `Labeling image ${number + 1} of ${given.length} …` : "Labeling …");
    try {
      found.push(await send(file));
    } catch (error) {
      errors.push(error instanceof TypeError ? `${file.name}: the server does not answer` : error.message);
    }
  }
  say(errors.length ? errors.join("; ") : "", errors.length > 0);
  images = found;
  show(0);
}

function enable() {
  const drop = at("drop");
  at("file").addEventListener("change", (event) => { take(event.target.files); });
  at("file").addEventListener("click", (event) => { event.target.value = ""; }); // the same file may be chosen again
  addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  addEventListener("dragleave", () => drop.classList.remove("over"));
  addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); take(event.dataTransfer.files); });
  addEventListener("paste", (event) => { if (event.clipboardData.files.length) take(event.clipboardData.files); });
  at("all").addEventListener("change", drawLabels);
}

// ------------------------------------------------------------------------------------------------------- results out
function show(number) {
  current = number;
  at("result").hidden = !images.length;
  at("strip").hidden = images.length < 2;
  at("strip").replaceChildren(...images.map((image, other) => {
    const button = make("button", { type: "button", data: { "aria-pressed": other === number } },
      make("img", { src: image.attention.image, alt: image.image }));
    button.addEventListener("click", () => show(other));
    return button;
  }));
  if (!images.length) return;
  label = byScore()[0];
  const maps = images[current].attention.maps;
  if (!maps[map]) { map = Object.keys(maps)[0] ?? null; query = 0; }
  drawLabels();
  drawControls();
}

const byScore = () => Object.keys(images[current].scores).sort((a, b) => images[current].scores[b] - images[current].scores[a]);

function drawLabels() {
  const { scores, labels } = images[current], chosen = new Set(labels), all = byScore();
  const listed = at("all").checked ? all : all.filter((name, rank) => rank < SHOWN || chosen.has(name));
  at("all").parentElement.hidden = all.length <= Math.max(SHOWN, chosen.size);
  at("chosen").textContent = `${chosen.size} of ${all.length} labels`;
  const thresholds = new Map(model.labels.map(({ name, threshold }) => [name, threshold]));
  at("labels").replaceChildren(...listed.map((name) => {
    const threshold = thresholds.get(name), filled = make("i"), bar = make("span", { className: "bar" }, filled);
    filled.style.width = `${100 * scores[name]}%`;
    if (threshold !== null) {
      const mark = make("b");
      mark.style.left = `min(${100 * Math.min(1, threshold)}%, calc(100% - 2px))`;
      bar.append(mark);
    }
    const reaches = threshold === null ? "never predicted" : `threshold ${percent(threshold)}`;
    const button = make("button", { type: "button", className: chosen.has(name) ? "yes" : "", title: reaches,
      data: { "aria-pressed": name === label, "aria-label": `${name}, ${percent(scores[name])}, ${reaches}` } },
      make("span", { textContent: name }), bar, make("span", { className: "score", textContent: percent(scores[name]) }));
    button.addEventListener("click", () => { label = name; chooseLabelMap(); drawLabels(); drawControls(); });
    return make("li", {}, button);
  }));
  drawGates();
}

function drawGates() {
  at("gates").replaceChildren(...Object.entries(images[current].gates ?? {}).map(([gate, weights]) => {
    const entries = model.gates[gate];
    const parts = weights[label].map((weight, e) => {
      const part = make("i", { className: `g${(e % 8) + 1}`, title: `${entries[e]} ${percent(weight)}` });
      part.style.width = `${100 * weight}%`;
      return part;
    });
    const text = weights[label].map((weight, e) => `${entries[e]} ${percent(weight)}`);
    return make("div", { className: "gate" }, make("strong", { textContent: `gate ${gate} of ${label}` }),
      make("div", { className: "bar", data: { role: "img", "aria-label": text.join(", ") } }, ...parts),
      make("div", { className: "legend" }, ...text.map((one, e) => make("span", {}, make("i", { className: `g${(e % 8) + 1}` }), one))));
  }));
}

/** Show the attention of the selected label, if labels have one. */
function chooseLabelMap() {
  const maps = images[current].attention.maps;
  if (maps.labels) { map = "labels"; query = maps.labels.queries.indexOf(label); }
}

function choice(options, value, change) {
  const select = make("select", {}, ...options.map(([of, text]) => make("option", { value: of, textContent: text })));
  select.value = value;
  select.addEventListener("change", () => change(select.value));
  return select;
}

function drawControls() {
  const maps = images[current].attention.maps;
  if (!map) {
    at("attention").replaceChildren(make("span", { className: "soft", textContent: "This model has no attention over the image." }));
    return paint();
  }
  const kinds = choice(Object.keys(maps).map((name) => [name, name]), map, (value) => { map = value; query = 0; drawControls(); });
  const queries = choice(maps[map].queries.map((name, q) => [q, name]), query, (value) => { query = Number(value); paint(); });
  const slider = make("input", { type: "range", min: 0, max: 1, step: 0.05, value: strength });
  slider.addEventListener("input", () => { strength = Number(slider.value); paint(); });
  at("attention").replaceChildren(make("label", {}, "attention of", kinds), make("label", {}, "query", queries), make("label", {}, "overlay", slider));
  paint();
}

/** Color of a relative attention in 0…1: from dark violet through red and orange to bright yellow. */
function heat(value) {
  const stops = [[20, 8, 40, 0.62], [150, 20, 60, 0.55], [235, 90, 20, 0.5], [255, 215, 60, 0.5]];
  const place = Math.min(2.9999, 3 * value), low = stops[Math.floor(place)], high = stops[Math.floor(place) + 1], part = place % 1;
  return low.map((from, channel) => from + part * (high[channel] - from));
}

async function paint() {
  const { image, attention } = images[current], source = new Image();
  source.src = attention.image;
  await source.decode();
  const canvas = at("canvas"), side = 416, scale = Math.max(1, side / Math.max(source.naturalWidth, source.naturalHeight));
  canvas.width = source.naturalWidth * scale;
  canvas.height = source.naturalHeight * scale;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = source.naturalWidth >= 160;
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  let caption = `${image}, as the model receives it`;
  if (map) {
    const [rows, columns] = attention.grid, { queries, weights } = attention.maps[map], row = weights[query];
    const most = Math.max(...row), small = make("canvas", { width: columns, height: rows });
    const pixels = small.getContext("2d").createImageData(columns, rows);
    row.forEach((weight, n) => {
      const [red, green, blue, alpha] = heat(most ? weight / most : 0);
      pixels.data.set([red, green, blue, 255 * alpha], 4 * n);
    });
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = true;
    context.globalAlpha = strength;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
    caption = `${image}: attention of ${queries[query]}, brightest ${percent(most)}`;
  }
  at("caption").textContent = caption;
  canvas.setAttribute("aria-label", caption);
  canvas.dataset.drawn = Number(canvas.dataset.drawn ?? 0) + 1;
}

async function start() {
  enable();
  try {
    model = await (await fetch("/model")).json();
  } catch {
    say("The server does not answer; load the page again.", true);
    return;
  }
  const { labels, image_size: side, limits } = model;
  at("model").textContent = `A model with ${labels.length} labels, for images of ${side} × ${side} pixels.`;
  at("limits").textContent = `At most ${limits.megabytes} MiB and ${limits.megapixels} million pixels each.`;
  document.documentElement.dataset.ready = "true";
}
start();
