// Widgets: images with their labels, routing weights, attention, and the menu of the curves.

const samples = read("data-samples");
const images = new Map(Object.entries(read("data-of-images"))); // name -> data address

const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const CODES = { "1": ["✓ present", "yes"], "0": ["absent", "no"], "-1": ["unknown", "no"], "2": ["difficult", "no"] };

function imageOf(name) {
  const image = make("img", { src: images.get(name), alt: `Image ${name}` });
  image.addEventListener("load", () => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < 100));
  return image;
}
/** Per sample: label -> its code and score. */
const known = (samples.labels ?? []).map((rows) => new Map(rows.map(([k, code, score]) => [k, { code, score }])));

// -------------------------------------------------------------------------------------------------------- cards
const OUTCOMES = { right: "✓", missed: "missed", false: "false", unknown: "unknown" };
const KINDS = [["", "all"], ["missed", "with a missed label"], ["false", "with a false label"], ["right", "with a right label"]];

/** Images with their labels [name, outcome, score]; `filter` adds menus that choose by label, outcome and name. */
widgets.cards = (place, { title, cards: all, filter }) => {
  let label = "", kind = "";
  const cards = make("div", { className: "cards" }), count = make("span", { className: "no", "aria-live": "polite" });
  const search = make("input", { type: "search", placeholder: "name", "aria-label": "Search an image by its name" });
  const matches = ({ id, labels }) => id.toLowerCase().includes(search.value.toLowerCase())
    && ((!label && !kind) || labels.some(([name, outcome]) => (!label || name === label) && (!kind || outcome === kind)));
  function draw() {
    const shown = all.filter(matches);
    count.textContent = `${shown.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} images`;
    cards.replaceChildren(...shown.map(({ id, labels }) => make("div", { className: "card" }, imageOf(id),
      ...Object.entries(OUTCOMES).map(([which, word]) => {
        const text = labels.filter(([, outcome]) => outcome === which).map(([name, , score]) => `${name} ${inPercent(score, 0)}`).join(", ");
        return text ? make("div", { className: which }, make("strong", { textContent: word }), ` ${text}`) : null;
      }), make("div", { className: "no", textContent: id }))));
  }
  if (title) place.append(make("h3", { textContent: title }));
  if (filter) {
    const names = [...new Set(all.flatMap(({ labels }) => labels.map(([name]) => name)))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const labelChoice = choice([["", "any"], ...names.map((name) => [name, name])], (value) => { label = value; draw(); });
    const kindChoice = choice(KINDS, (value) => { kind = value; draw(); });
    search.addEventListener("input", draw);
    place.append(make("div", { className: "controls" }, labeled("label", labelChoice), labeled("images", kindChoice), labeled("name", search), count));
  }
  place.append(cards);
  draw();
};

// -------------------------------------------------------------------------------------------------------- gates
/** A stacked bar of weights that sum to 1. */
function weightBar(weights, { name, entries }) {
  const text = `${name}: ` + weights.map((weight, e) => `${entries[e]} ${inPercent(weight, 0)}`).join(", ");
  return make("span", { className: "bar", title: text, role: "img", "aria-label": text },
    ...weights.map((weight, e) => make("i", { className: `g${(e % 8) + 1}`, style: `width:${100 * weight}%` })));
}

widgets.gates = (place, { labels, gates }) => {
  const unpacked = gates.map((gate) => ({ ...gate, bytes: decode(gate.weights) }));
  const cards = make("div", { className: "cards" });
  function draw(at) {
    const of = (image) => known[image].get(labels[at]), order = samples.ids.map((_, image) => image);
    order.sort((a, b) => (of(b)?.score ?? -1) - (of(a)?.score ?? -1));
    cards.replaceChildren(...order.map((image) => {
      const [text, look] = of(image) ? CODES[of(image).code] : ["low score", "no"];
      const bars = unpacked.map((gate) => {
        const from = ((gate.images === 1 ? 0 : image) * labels.length + at) * gate.entries.length;
        return weightBar(gate.entries.map((_, e) => gate.bytes[from + e] / 255), gate);
      });
      const score = of(image) ? ` · ${inPercent(of(image).score)}` : "";
      return make("div", { className: "card" }, imageOf(samples.ids[image]),
        make("span", {}, make("span", { className: look, textContent: text }), score), ...bars);
    }));
  }
  const select = choice(labels.map((k, at) => [at, samples.names[k]]), (value) => draw(Number(value)));
  const legends = unpacked.map((gate) => make("div", { className: "legend" }, make("strong", { textContent: gate.name }),
    ...gate.entries.map((name, e) => make("span", {}, make("i", { className: `g${(e % 8) + 1}` }), name))));
  place.append(make("div", { className: "controls" }, labeled("label", select)), ...legends, cards);
  select.value = Math.max(0, labels.findIndex((k) => known.some((of) => of.get(k)?.code === 1)));
  draw(Number(select.value));
};

// ---------------------------------------------------------------------------------------------------- attention
/** Color of a relative attention in 0…1: from dark violet through red and orange to bright yellow. */
function heat(value) {
  const stops = [[20, 8, 40, 0.62], [150, 20, 60, 0.55], [235, 90, 20, 0.5], [255, 215, 60, 0.5]];
  const place = Math.min(2.9999, 3 * value), low = stops[Math.floor(place)], high = stops[Math.floor(place) + 1], part = place % 1;
  return low.map((from, channel) => from + part * (high[channel] - from));
}

widgets.attention = (place, { grid: [rows, columns], maps }) => {
  const tokens = rows * columns, kinds = maps.map((kind) => ({ ...kind, bytes: decode(kind.maps) }));
  const sources = samples.ids.map((name) => make("img", { src: images.get(name), alt: "" }));
  const cards = make("div", { className: "cards large" });
  let kind = kinds[0], image = 0, strength = 1;

  function paint(canvas, at) {
    const source = sources[image], width = source.naturalWidth, height = source.naturalHeight;
    if (!width) return; // a damaged image
    const scale = Math.max(1, Math.ceil(224 / Math.max(width, height)));
    Object.assign(canvas, { width: width * scale, height: height * scale });
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = width >= 160;
    context.drawImage(source, 0, 0, canvas.width, canvas.height);
    const small = make("canvas", { width: columns, height: rows }), pixels = new ImageData(columns, rows);
    for (let n = 0; n < tokens; n++) {
      const [red, green, blue, alpha] = heat(kind.bytes[(image * kind.shown[image].length + at) * tokens + n] / 255);
      pixels.data.set([red, green, blue, 255 * alpha], 4 * n);
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = true;
    context.globalAlpha = strength;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
  }
  function describe(query, at) {
    const of = kind.name === "labels" ? known[image].get(query) : null;
    const truth = of ? `, ${CODES[of.code][0]}, score ${inPercent(of.score)}` : "";
    return `${kind.queries[query]}${truth}, peak ${kind.peaks[image][at].toFixed(1)} ×`;
  }
  async function draw() {
    await sources[image].decode().catch(() => {});
    cards.replaceChildren(...kind.shown[image].map((query, at) => {
      const text = describe(query, at), canvas = make("canvas", { role: "img", "aria-label": `Attention of ${text}` });
      paint(canvas, at);
      return make("div", { className: "card" }, canvas, make("span", { textContent: text }));
    }));
  }
  const imageChoice = choice(samples.ids.map((id, index) => [index, `${index + 1}. ${id}`]), (value) => { image = Number(value); draw(); });
  const kindChoice = choice(kinds.map((one, index) => [index, one.name]), (value) => { kind = kinds[value]; draw(); });
  const slider = make("input", { type: "range", min: 0, max: 1, step: 0.05, value: 1 });
  slider.addEventListener("input", () => { strength = Number(slider.value); draw(); });
  place.append(make("div", { className: "controls" }, labeled("attention of", kindChoice), labeled("image", imageChoice), labeled("overlay", slider)), cards);
  draw();
};

// ------------------------------------------------------------------------------------------------------- curves
widgets.curves = (place, labels) => {
  const facts = make("span", { className: "no", "aria-live": "polite" });
  function draw(index) {
    const { rows, positives, error } = labels[index];
    facts.textContent = `${positives.toLocaleString("en")} positives, calibration error ${inPercent(error, 2)}`;
    for (const [chart, data] of Object.entries(rows)) if (views[chart]) views[chart].data("chosen", data).resize().run();
  }
  const select = choice(labels.map(({ name }, index) => [index, name]), draw);
  place.append(make("div", { className: "controls" }, labeled("label", select), facts));
  document.addEventListener("drawn", () => draw(select.value));
  draw(0);
};
