// Widgets: images with their labels, routing weights, and attention.

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

/**
 * Images with their labels [name, outcome, score]; `filter` adds menus that choose by label, outcome and name. `words`
 * are the names of outcomes, and `kinds` the choices of the menu.
 */
widgets.cards = (place, { title, cards: all, filter, words = OUTCOMES, kinds = KINDS }) => {
  let label = "", kind = "";
  const cards = make("div", { className: "cards" }), count = make("span", { className: "no", "aria-live": "polite" });
  const search = make("input", { type: "search", placeholder: "name", "aria-label": "Search an image by its name" });
  const matches = ({ id, labels }) => id.toLowerCase().includes(search.value.toLowerCase())
    && ((!label && !kind) || labels.some(([name, outcome]) => (!label || name === label) && (!kind || outcome === kind)));
  function draw() {
    const shown = all.filter(matches);
    count.textContent = `${shown.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} images`;
    cards.replaceChildren(...shown.map(({ id, labels }) => make("div", { className: "card" }, imageOf(id),
      ...Object.entries(words).map(([which, word]) => {
        const text = labels.filter(([, outcome]) => outcome === which).map(([name, , score]) => `${name} ${inPercent(score, 0)}`).join(", ");
        return text ? make("div", { className: which }, make("strong", { textContent: word }), ` ${text}`) : null;
      }), make("div", { className: "no", textContent: id }))));
  }
  if (title) place.append(make("h3", { textContent: title }));
  if (filter) {
    const names = [...new Set(all.flatMap(({ labels }) => labels.map(([name]) => name)))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const labelChoice = choice([["", "any"], ...names.map((name) => [name, name])], (value) => { label = value; draw(); });
    const kindChoice = choice(kinds, (value) => { kind = value; draw(); });
    search.addEventListener("input", draw);
    place.append(make("div", { className: "controls" }, labeled("label", labelChoice), labeled("images", kindChoice), labeled("name", search), count));
  }
  place.append(cards);
  draw();
};

// -------------------------------------------------------------------------------------------------------- gates
const color = (entry) => `var(--c${(entry % 8) + 1})`;

/** A stacked bar of weights that sum to 1. */
function weightBar(weights, { name, entries }) {
  const text = `${name}: ` + weights.map((weight, e) => `${entries[e]} ${inPercent(weight, 0)}`).join(", ");
  return make("span", { className: "bar", title: text, role: "img", "aria-label": text },
    ...weights.map((weight, e) => make("i", { style: `width:${100 * weight}%;background:${color(e)}` })));
}

widgets.gates = (place, { labels, gates }) => {
  const unpacked = gates.map((gate) => ({ ...gate, bytes: decode(gate.weights) }));
  const cards = make("div", { className: "cards" });
  function draw(at) {
    const of = (image) => known[image].get(labels[at]), order = samples.ids.map((_, image) => image);
    order.sort((a, b) => (of(b)?.score ?? -1) - (of(a)?.score ?? -1));
    cards.replaceChildren(...order.map((image) => {
      const [text, style] = of(image) ? CODES[of(image).code] : ["low score", "no"];
      const bars = unpacked.map((gate) => {
        const from = ((gate.images === 1 ? 0 : image) * labels.length + at) * gate.entries.length;
        return weightBar(gate.entries.map((_, e) => gate.bytes[from + e] / 255), gate);
      });
      const score = of(image) ? ` · ${inPercent(of(image).score)}` : "";
      return make("div", { className: "card" }, imageOf(samples.ids[image]),
        make("span", {}, make("span", { className: style, textContent: text }), score), ...bars);
    }));
  }
  const select = choice(labels.map((k, at) => [at, samples.names[k]]), (value) => draw(Number(value)));
  const legends = unpacked.map((gate) => make("div", { className: "legend" }, make("strong", { textContent: gate.name }),
    ...gate.entries.map((name, e) => make("span", {}, make("i", { style: `background:${color(e)}` }), name))));
  place.append(make("div", { className: "controls" }, labeled("label", select)), ...legends, cards);
  select.value = Math.max(0, labels.findIndex((k) => known.some((of) => of.get(k)?.code === 1)));
  draw(Number(select.value));
};

// ---------------------------------------------------------------------------------------------------- attention
widgets.attention = (place, { grid: [rows, columns], maps }) => {
  const tokens = rows * columns, kinds = maps.map((kind) => ({ ...kind, bytes: decode(kind.maps) }));
  const cards = make("div", { className: "cards large" });
  let kind = kinds[0], image = 0;

  /** One pixel per patch, the more opaque the more attention, which the style sheet stretches over the image. */
  function overlay(text, at) {
    const canvas = make("canvas", { width: columns, height: rows, role: "img", "aria-label": `Attention of ${text}` });
    const pixels = new ImageData(columns, rows);
    for (let n = 0; n < tokens; n++) {
      pixels.data.set([240, 60, 10, 0.8 * kind.bytes[(image * kind.shown[image].length + at) * tokens + n]], 4 * n);
    }
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  }
  function describe(query, at) {
    const of = kind.name === "labels" ? known[image].get(query) : null;
    const truth = of ? `, ${CODES[of.code][0]}, score ${inPercent(of.score)}` : "";
    return `${kind.queries[query]}${truth}, peak ${kind.peaks[image][at].toFixed(1)} ×`;
  }
  function draw() {
    cards.replaceChildren(...kind.shown[image].map((query, at) => {
      const text = describe(query, at), under = imageOf(samples.ids[image]);
      return make("div", { className: "card" }, make("div", { className: "overlaid" }, under, overlay(text, at)), make("span", { textContent: text }));
    }));
  }
  const imageChoice = choice(samples.ids.map((id, index) => [index, `${index + 1}. ${id}`]), (value) => { image = Number(value); draw(); });
  const kindChoice = choice(kinds.map((one, index) => [index, one.name]), (value) => { kind = kinds[value]; draw(); });
  place.append(make("div", { className: "controls" }, labeled("attention of", kindChoice), labeled("image", imageChoice)), cards);
  draw();
};
