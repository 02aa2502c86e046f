// The page of the server: images in, labels with thresholds, gates and attention out.
"use strict";

const at = (id) => document.getElementById(id);
const percent = (value) => `${(100 * value).toFixed(value > 0.0995 ? 0 : 1)} %`;
let model = null, images = [], current = 0, label = null;

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
  const form = new FormData(), gates = Object.keys(model.gates).length > 0;
  form.append("images", file, file.name || "pasted image");
  const answer = await fetch(`predict?attention=true&gates=${gates}`, { method: "POST", body: form });
  const body = await answer.json().catch(() => ({ error: `the server answered with status ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error);
  return body.results[0];
}

async function take(given) {
  const files = [...given], results = [], errors = [];
  if (!files.length) return say("This is not a file.", true);
  for (const [number, file] of files.entries()) {
    say(`Labeling image ${number + 1} of ${files.length} …`);
    try {
      results.push(await send(file));
    } catch (error) {
      errors.push(error instanceof TypeError ? `${file.name}: the server does not answer` : error.message);
    }
  }
  say(errors.join("; "), errors.length > 0);
  images = results;
  show(0);
}

// ------------------------------------------------------------------------------------------------------- results out
function show(number) {
  current = number;
  at("result").hidden = !images.length;
  at("strip").hidden = images.length < 2;
  at("strip").replaceChildren(...images.map((image, other) => make("button",
    { type: "button", data: { "aria-pressed": other === number }, onclick: () => show(other) },
    make("img", { src: image.attention.image, alt: image.image }))));
  if (!images.length) return;
  label = byScore()[0];
  const maps = Object.entries(images[current].attention.maps);
  at("attention").replaceChildren(make("option", { value: "", textContent: "nothing" }), ...maps.map(([map, { queries }]) =>
    make("optgroup", { label: map }, ...queries.map((name, q) => make("option", { value: `${map}/${q}`, textContent: name })))));
  at("attention").value = maps.length ? `${maps[0][0]}/0` : "";
  drawLabels();
  paint();
}

const byScore = () => Object.keys(images[current].scores).sort((a, b) => images[current].scores[b] - images[current].scores[a]);

function select(name) {
  label = name;
  const { maps } = images[current].attention;
  if (maps.labels) at("attention").value = `labels/${maps.labels.queries.indexOf(name)}`;
  drawLabels();
  paint();
}

function drawLabels() {
  const { scores, labels } = images[current], chosen = new Set(labels);
  at("chosen").textContent = `${chosen.size} of ${model.labels.length} labels`;
  const values = new Set(Object.values(model.attributes).flat());
  const thresholds = new Map(model.labels.map(({ name, threshold }) => [name, threshold]));
  at("labels").replaceChildren(...byScore().map((name) => {
    const threshold = thresholds.get(name), filled = make("i"), bar = make("span", { className: "bar" }, filled);
    filled.style.width = `${100 * scores[name]}%`;
    if (threshold !== null && !values.has(name)) {
      const mark = make("b");
      mark.style.left = `min(${100 * Math.min(1, threshold)}%, calc(100% - 2px))`;
      bar.append(mark);
    }
    const limit = threshold === null ? "never predicted" : `threshold ${percent(threshold)}`;
    const title = values.has(name) ? "one value of an attribute is predicted" : limit;
    const data = { "aria-pressed": name === label, "aria-label": `${name}, ${percent(scores[name])}, ${title}` };
    return make("li", {}, make("button",
      { type: "button", className: chosen.has(name) ? "yes" : "", title, data, onclick: () => select(name) },
      make("span", { textContent: name }), bar, make("span", { className: "score", textContent: percent(scores[name]) })));
  }));
  at("gates").replaceChildren(...Object.entries(images[current].gates ?? {}).map(([gate, weights]) => {
    const texts = weights[label].map((weight, e) => `${model.gates[gate][e]} ${percent(weight)}`);
    const parts = weights[label].map((weight, e) => {
      const part = make("i", { className: `g${(e % 8) + 1}`, title: texts[e] });
      part.style.width = `${100 * weight}%`;
      return part;
    });
    const legend = texts.map((text, e) => make("span", {}, make("i", { className: `g${(e % 8) + 1}` }), text));
    return make("div", { className: "gate" }, make("strong", { textContent: `gate ${gate} of ${label}` }),
      make("div", { className: "bar" }, ...parts), make("div", { className: "legend" }, ...legend));
  }));
}

/** Color of a relative attention in 0…1: from dark violet through red and orange to bright yellow. */
function heat(value) {
  const stops = [[20, 8, 40, 0.62], [150, 20, 60, 0.55], [235, 90, 20, 0.5], [255, 215, 60, 0.5]];
  const place = Math.min(2.9999, 3 * value), low = stops[Math.floor(place)], high = stops[Math.floor(place) + 1], part = place % 1;
  return low.map((from, channel) => from + part * (high[channel] - from));
}

async function paint() {
  const { image, attention } = images[current], source = new Image(), [map, query] = at("attention").value.split("/");
  source.src = attention.image;
  await source.decode();
  const canvas = at("canvas"), scale = Math.max(1, 416 / Math.max(source.naturalWidth, source.naturalHeight));
  canvas.width = source.naturalWidth * scale;
  canvas.height = source.naturalHeight * scale;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = source.naturalWidth >= 160;
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  let caption = `${image}, as the model receives it`;
  if (map) {
    const [rows, columns] = attention.grid, row = attention.maps[map].weights[query];
    const most = Math.max(...row), small = make("canvas", { width: columns, height: rows });
    const pixels = small.getContext("2d").createImageData(columns, rows);
    row.forEach((weight, n) => {
      const [red, green, blue, alpha] = heat(most ? weight / most : 0);
      pixels.data.set([red, green, blue, 255 * alpha], 4 * n);
    });
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = true;
    context.globalAlpha = 0.8;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
    caption = `${image}: attention of ${attention.maps[map].queries[query]}, brightest ${percent(most)}`;
  }
  at("caption").textContent = caption;
  canvas.setAttribute("aria-label", caption);
  canvas.dataset.drawn = Number(canvas.dataset.drawn ?? 0) + 1;
}

async function start() {
  model = await (await fetch("model")).json();
  const { labels, image_size: side, limits } = model, over = (is) => at("drop").classList.toggle("over", is);
  at("model").textContent = `A model with ${labels.length} labels, for images of ${side} × ${side} pixels.`;
  if (Object.keys(model.attributes).length) at("rule").append(" Of labels without a mark, the most probable of each attribute is predicted.");
  at("limits").textContent = `At most ${limits.megabytes} MiB and ${limits.megapixels} million pixels each.`;
  at("file").addEventListener("change", (event) => { take(event.target.files); });
  at("file").addEventListener("click", (event) => { event.target.value = ""; }); // the same file may be chosen again
  at("attention").addEventListener("change", paint);
  addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
  addEventListener("dragleave", () => over(false));
  addEventListener("drop", (event) => { event.preventDefault(); over(false); take(event.dataTransfer.files); });
  addEventListener("paste", (event) => { if (event.clipboardData.files.length) take(event.clipboardData.files); });
  document.documentElement.dataset.ready = "true";
}
start().catch(() => say("The server does not answer; load the page again.", true));
