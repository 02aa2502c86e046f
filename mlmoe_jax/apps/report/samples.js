// Widgets for images, and the menus of the curves.

const samples = read("data-samples");
const thumbnails = document.getElementById("data-widget-images") ? read("data-widget-images").thumbnails : {}; // by name

const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const CODES = { "1": ["✓ present", "yes"], "0": ["absent", "no"], "-1": ["unknown", "no"], "2": ["difficult", "no"] };

function imageFrom(source, name) {
  if (!source) return make("div", { className: "blank", textContent: "not shown" });
  const image = make("img", { src: source, alt: `Image ${name}` });
  image.addEventListener("load", () => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < 100));
  return image;
}
const imageOf = (index) => imageFrom(samples.images[index], samples.ids[index]);
/** An image of the reported split by its name; samples are embedded only once. */
const imageNamed = (name) => imageFrom(Object.hasOwn(thumbnails, name) ? thumbnails[name] || samples.images[samples.ids.indexOf(name)] : "", name);

/** A stacked bar of weights that sum to 1. */
function weightBar(weights, names, prefix) {
  const text = prefix + weights.map((weight, e) => `${names[e]} ${(100 * weight).toFixed(0)} %`).join(", ");
  return make("span", { className: "bar", title: text, role: "img", "aria-label": text },
    ...weights.map((weight, e) => make("i", { className: `g${(e % 8) + 1}`, style: `width:${100 * weight}%` })));
}

// -------------------------------------------------------------------------------------------------------- gates
widgets.gates = (place, { labels, gates }) => {
  const unpacked = gates.map((gate) => ({ ...gate, bytes: decode(gate.weights) }));
  const weightsOf = (gate, image, label) => {
    const from = ((gate.images === 1 ? 0 : image) * labels.length + label) * gate.entries.length;
    return gate.entries.map((_, e) => gate.bytes[from + e] / 255);
  };
  const known = samples.labels.map((rows) => new Map(rows.map(([k, code, score]) => [k, { code, score }])));
  let label = 0, image = 0, order = "score", onlyWith = false;

  const cards = make("div", { className: "cards" }), detail = make("div", { className: "detail" });
  const labelChoice = choice(labels.map((k, at) => [at, samples.names[k]]), (value) => { label = Number(value); draw(); });
  const orders = [["score", "score of the label"]].concat(
    unpacked.flatMap((gate, g) => (gate.images === 1 ? [] : gate.entries.map((entry, e) => [`${g} ${e}`, `${gate.name}: ${entry}`]))));
  const orderChoice = choice(orders, (value) => { order = value; draw(); });
  const only = make("input", { type: "checkbox" });
  only.addEventListener("change", () => { onlyWith = only.checked; draw(); });

  const entry = (index) => known[index].get(labels[label]);
  const value = (index) => {
    if (order === "score") return entry(index) ? entry(index).score : -1;
    const [g, e] = order.split(" ").map(Number);
    return weightsOf(unpacked[g], index, label)[e];
  };
  function draw() {
    const all = samples.ids.map((_, index) => index).filter((index) => !onlyWith || (entry(index) && entry(index).code === 1));
    all.sort((a, b) => value(b) - value(a));
    cards.replaceChildren(...all.map((index) => {
      const of = entry(index), [text, look] = of ? CODES[of.code] : ["low score", "no"];
      const card = make("button", { type: "button", className: "card", "aria-pressed": index === image }, imageOf(index),
        make("span", {}, make("span", { className: look, textContent: text }), of ? ` · ${inPercent(of.score)}` : ""),
        ...unpacked.map((gate) => weightBar(weightsOf(gate, index, label), gate.entries, `${gate.name}: `)));
      card.addEventListener("click", () => { image = index; draw(); });
      return card;
    }));
    if (!all.length) cards.append(make("p", { className: "note", textContent: "No sample image has this label." }));
    drawDetail();
  }
  function drawDetail() {
    const rows = samples.labels[image].filter(([k]) => labels.includes(k)).map(([k, code, score]) => make("tr", {},
      make("th", { scope: "row", textContent: samples.names[k] }), make("td", { className: "number", textContent: inPercent(score) }),
      make("td", { className: CODES[code][1], textContent: CODES[code][0] }),
      make("td", { className: "wide" }, ...unpacked.map((gate) => weightBar(weightsOf(gate, image, labels.indexOf(k)), gate.entries, `${gate.name}: `)))));
    const heads = ["label", "score", "truth", unpacked.map((gate) => gate.name).join(", then ")];
    detail.replaceChildren(
      make("div", {}, imageOf(image), make("div", { className: "caption", textContent: samples.ids[image] })),
      make("div", { className: "scroll" }, make("table", {},
        make("caption", { textContent: "Labels of the selected image, followed by those with the highest scores." }),
        make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", textContent: text })))), make("tbody", {}, ...rows))));
  }
  const legends = unpacked.map((gate) => make("div", { className: "legend" }, make("strong", { textContent: gate.name }),
    ...gate.entries.map((name, e) => make("span", {}, make("i", { className: `g${(e % 8) + 1}` }), name))));
  place.append(make("div", { className: "controls" }, labeled("label", labelChoice), labeled("sort images by", orderChoice),
    make("label", { className: "check" }, only, "only images with this label")), ...legends, cards, detail);
  const shown = labels.findIndex((k) => samples.labels.some((rows) => rows.some(([other, code]) => other === k && code === 1)));
  labelChoice.value = label = Math.max(0, shown);
  image = samples.ids.map((_, index) => index).reduce((best, index) => (value(index) > value(best) ? index : best), 0);
  draw();
};

// ---------------------------------------------------------------------------------------------------- attention
/** Color of a relative attention in 0…1: from dark violet through red and orange to bright yellow. */
function heat(value) {
  const stops = [[20, 8, 40, 0.62], [150, 20, 60, 0.55], [235, 90, 20, 0.5], [255, 215, 60, 0.5]];
  const place = Math.min(2.9999, 3 * value), low = stops[Math.floor(place)], high = stops[Math.floor(place) + 1], part = place % 1;
  return low.map((from, channel) => from + part * (high[channel] - from));
}

widgets.attention = (place, { grid: [rows, columns], maps }) => {
  const tokens = rows * columns;
  const kinds = maps.map((kind) => ({ ...kind, bytes: decode(kind.maps) }));
  const sources = samples.images.map((source) => make("img", { src: source, alt: "" }));
  let kind = kinds[0], image = 0, query = kind.kept[0][0], strength = 1;

  function paint(canvas, index, position) {
    const source = sources[index], width = source.naturalWidth, height = source.naturalHeight;
    if (!width) { source.addEventListener("load", () => paint(canvas, index, position), { once: true }); return; }
    const scale = Math.max(1, Math.ceil(canvas.dataset.side / Math.max(width, height)));
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = width >= 160;
    context.drawImage(source, 0, 0, canvas.width, canvas.height);
    const small = make("canvas", { width: columns, height: rows }), pixels = small.getContext("2d").createImageData(columns, rows);
    const from = (index * kind.kept[index].length + position) * tokens;
    for (let n = 0; n < tokens; n++) {
      const [red, green, blue, alpha] = heat(kind.bytes[from + n] / 255);
      pixels.data.set([red, green, blue, 255 * alpha], 4 * n);
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = true;
    context.globalAlpha = strength;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
  }

  const large = make("canvas", { role: "img", "data-side": 480 }), caption = make("div", { className: "caption" });
  const grid = make("div", { className: "cards" });
  const imageChoice = choice(samples.ids.map((id, index) => [index, `${index + 1}. ${id}`]), (value) => { image = Number(value); draw(); });
  const queryPlace = make("span");
  const slider = make("input", { type: "range", min: 0, max: 1, step: 0.05, value: 1 });
  slider.addEventListener("input", () => { strength = Number(slider.value); drawLarge(); });
  const move = (by) => () => { image = (image + by + samples.ids.length) % samples.ids.length; imageChoice.value = image; draw(); };
  const back = make("button", { type: "button", textContent: "‹ image" }), on = make("button", { type: "button", textContent: "image ›" });
  back.addEventListener("click", move(-1));
  on.addEventListener("click", move(1));

  const known = samples.labels.map((list) => new Map(list.map(([k, code, score]) => [k, { code, score }])));
  function describe(q, position) {
    const of = kind.name === "labels" ? known[image].get(q) : null;
    const truth = of ? `, ${CODES[of.code][0]}, score ${inPercent(of.score)}` : "";
    return `${kind.queries[q]}${truth}, peak ${kind.peaks[image][position].toFixed(1)} ×`;
  }
  function drawLarge() {
    const position = Math.max(0, kind.kept[image].indexOf(query));
    query = kind.kept[image][position];
    paint(large, image, position);
    large.setAttribute("aria-label", `Attention of ${describe(query, position)} over image ${samples.ids[image]}`);
    caption.textContent = `${samples.ids[image]}: ${describe(query, position)}`;
    for (const card of grid.children) card.setAttribute("aria-pressed", card.dataset.query === String(query));
  }
  function draw() {
    const kept = kind.kept[image];
    const listed = kind.name === "labels" // labels of the image first
      ? [...kept].sort((a, b) => (known[image].has(b) - known[image].has(a)) || (known[image].get(b)?.score ?? 0) - (known[image].get(a)?.score ?? 0)) : kept;
    const select = choice(listed.map((q) => [q, kind.queries[q]]), (value) => { query = Number(value); drawLarge(); });
    if (!kept.includes(query) || kind.name === "labels") query = listed[0];
    select.value = query;
    queryPlace.replaceChildren(labeled(kind.name === "labels" ? "label" : "query", select));
    grid.replaceChildren(...listed.slice(0, 36).map((q) => {
      const position = kept.indexOf(q), canvas = make("canvas", { "data-side": 96, "aria-hidden": "true" });
      paint(canvas, image, position);
      const card = make("button", { type: "button", className: "card", "data-query": q, "aria-pressed": "false" }, canvas, make("span", { textContent: describe(q, position) }));
      card.addEventListener("click", () => { query = q; select.value = q; drawLarge(); });
      return card;
    }));
    drawLarge();
  }
  const kindChoice = choice(kinds.map((one, index) => [index, one.name]), (value) => { kind = kinds[value]; query = kind.kept[image][0]; draw(); });
  place.append(make("div", { className: "controls" }, labeled("attention of", kindChoice), labeled("image", imageChoice), back, on,
    queryPlace, labeled("overlay", slider)), make("div", { className: "detail" }, make("div", {}, large, caption), grid));
  draw();
};

// ----------------------------------------------------------------------------------------------------- mistakes
widgets.mistakes = (place, groups) => {
  for (const { title, rows } of groups) {
    place.append(make("h3", { textContent: title }));
    if (!rows.length) { place.append(make("p", { className: "note", textContent: "None." })); continue; }
    place.append(make("div", { className: "cards" }, ...rows.map(({ id, label, score }) => make("div", { className: "card" },
      imageNamed(id), make("span", {}, make("strong", { textContent: label }), ` ${inPercent(score)}`), make("div", { className: "no", textContent: id })))));
  }
};

// ------------------------------------------------------------------------------------------------------- images
/** What a label [index, code, score, predicted] of an image is: unknown and difficult labels are none of these. */
const outcome = ([, code, , predicted]) => (code === 1 ? (predicted ? "right" : "missed") : code === 0 && predicted ? "false" : "open");
const OUTCOMES = { right: "✓", missed: "missed", false: "false", open: "unknown" };

widgets.images = (place, { cards: all, names }) => {
  if (!all.length) return;
  let label = "", kind = "";
  const cards = make("div", { className: "cards" }), count = make("span", { className: "no", "aria-live": "polite" });
  const search = make("input", { type: "search", placeholder: "name", "aria-label": "Search an image by its name" });
  function matches({ id, labels }) {
    if (!id.toLowerCase().includes(search.value.toLowerCase())) return false;
    const asked = labels.filter(([k]) => !label || String(k) === label);
    if (kind === "none") return (!label || asked.length > 0) && !asked.some((one) => ["missed", "false"].includes(outcome(one)));
    return kind || label ? asked.some((one) => !kind || outcome(one) === kind) : true;
  }
  function draw() {
    const shown = all.filter(matches);
    count.textContent = `${shown.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} images`;
    cards.replaceChildren(...shown.map(({ id, labels }) => make("div", { className: "card" }, imageNamed(id),
      ...Object.entries(OUTCOMES).map(([which, word]) => {
        const text = labels.filter((one) => outcome(one) === which).map(([k, , score]) => `${names[k]} ${inPercent(score, 0)}`).join(", ");
        return text ? make("div", { className: `outcome ${which}` }, make("strong", { textContent: word }), ` ${text}`) : null;
      }), make("div", { className: "no", textContent: id }))));
  }
  const labels = Object.entries(names).sort(([, a], [, b]) => a.localeCompare(b, undefined, { numeric: true }));
  const labelChoice = choice([["", "any"], ...labels], (value) => { label = value; draw(); });
  const kinds = [["", "all"], ["missed", "with a missed label"], ["false", "with a false label"], ["right", "with a right label"], ["none", "without a mistake"]];
  const kindChoice = choice(kinds, (value) => { kind = value; draw(); });
  search.addEventListener("input", draw);
  place.append(make("div", { className: "controls" }, labeled("label", labelChoice), labeled("images", kindChoice), labeled("name", search), count), cards);
  draw();
};

// ------------------------------------------------------------------------------------------------------- curves
/** Switch the curves of a section between steps and the time of training. */
widgets.axis = (place, { section, title, seconds }) => {
  const onClock = (spec) => ({ ...spec, transform: [{ calculate: `datum.elapsed / ${seconds}`, as: "clock" }],
    encoding: { ...spec.encoding, x: { ...spec.encoding.x, field: "clock", title, axis: { grid: false, tickCount: 6, format: "~r" } } } });
  const select = choice([["step", "steps"], ["time", title]], async (axis) => {
    for (const plot of document.querySelectorAll(`#${section} .plot`)) await drawChart(plot, axis === "time" ? onClock : undefined);
  });
  place.append(make("div", { className: "controls" }, labeled("axis", select)));
};

widgets.curves = (place, labels) => {
  const facts = make("span", { className: "no", "aria-live": "polite" });
  const point = (names, row, curve) => Object.fromEntries([...names.map((name, at) => [name, row[at]]), ["curve", curve]]);
  function draw(index) {
    const { name, curve, bins, positives, error } = labels[index];
    facts.textContent = `${positives.toLocaleString("en")} positives, calibration error ${inPercent(error, 2)}`;
    const rows = { "precision-recall": curve.map((row) => point(["recall", "precision", "threshold"], row, name)),
      reliability: bins.map((row) => point(["score", "share", "count"], row, name)) };
    for (const [chart, data] of Object.entries(rows)) if (views[chart]) views[chart].data("chosen", data).resize().run();
  }
  const select = choice(labels.map(({ name }, index) => [index, name]), draw);
  place.append(make("div", { className: "controls" }, labeled("label", select), facts));
  document.addEventListener("drawn", () => draw(select.value));
  draw(0);
};
