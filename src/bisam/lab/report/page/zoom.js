// Zoom: by dragging over a range, by Ctrl and the wheel, by buttons, by keys. It never leaves the data.

function extent(element) {
  const panel = panels.get(element);
  const of = (columns) => placesOf(columns, panel.axis) ?? [];
  const shown = panel.series.methods.filter((method) => !panel.hidden.has(method.title));
  const means = shown.flatMap(of);
  const values = means.length ? means : panel.series.runs.flatMap(of);
  return [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
}

function zoomTo(element, low, high) {
  const panel = panels.get(element);
  const [first, last] = extent(element);
  const width = Math.min(high - low, last - first);
  const start = Math.min(Math.max(low, first), last - width);
  const isAll = width >= last - first;
  Object.assign(panel, { low: isAll ? null : start, high: isAll ? null : start + width });
  update(element);
}

function move(element, scale, shift, at = 0.5) {
  const panel = panels.get(element);
  const [first, last] = extent(element);
  const low = panel.low ?? first;
  const width = (panel.high ?? last) - low;
  const start = low + at * width * (1 - scale) + shift * width;
  zoomTo(element, start, start + scale * width);
}

const MOVES = {
  "+": (element) => move(element, 0.5, 0),
  "-": (element) => move(element, 2, 0),
  "0": (element) => zoomTo(element, -Infinity, Infinity),
  l: (element) => {
    const [first, last] = extent(element);
    zoomTo(element, last - (last - first) / 5, last);
  },
  ArrowLeft: (element) => move(element, 1, -0.25),
  ArrowRight: (element) => move(element, 1, 0.25),
};

document.addEventListener("keydown", (event) => {
  const figure = event.target.closest?.("figure[data-curve]");
  if (!figure || figure !== event.target || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key === "=" ? "+" : event.key;
  if (views.has(figure) && Object.hasOwn(MOVES, key)) {
    event.preventDefault();
    MOVES[key](figure.closest(".curves"));
  }
});

// The pointer: its value on the horizontal axis, a line there, and one tooltip with all methods.

function valueAt(figure, clientX) {
  const view = views.get(figure);
  const box = figure.querySelector(".chart").getBoundingClientRect();
  const [low, high] = view.scale("x").range();
  const place = Math.min(Math.max(clientX - box.left - view.origin()[0], low), high);
  return { value: view.scale("x").invert(place), left: place + view.origin()[0] };
}

function nearest(rows, axis, value) {
  return rows.reduce((best, row) => (Math.abs(row[axis] - value) < Math.abs((best?.[axis] ?? Infinity) - value) ? row : best), null);
}

function showTooltip(figure, event) {
  const panel = panels.get(figure.closest(".curves"));
  const { value, left } = valueAt(figure, event.clientX);
  const { means, runs } = tablesOf(panel.series, figure.dataset.curve, panel.chosen);
  const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const lines = [];
  const add = (method, name, rows) => {
    const row = nearest(rows.filter((one) => one[panel.axis] !== null), panel.axis, value);
    if (!row || panel.hidden.has(method.title)) return;
    const range = row.least < row.most ? `${number.format(row.least)} to ${number.format(row.most)}` : "";
    const at = panel.axis === "epoch" ? row.epoch : `epoch ${row.epoch}`;
    lines.push(make("tr", {}, make("td", {}, swatch(method)), make("th", { textContent: name }),
      make("td", { textContent: number.format(row.value) }), make("td", { textContent: range }),
      make("td", { textContent: at })));
  };
  for (const method of panel.series.methods) add(method, method.title, means.filter((row) => row.method === method.title));
  for (const run of panel.series.runs) {
    const method = panel.series.methods.find((one) => one.title === run.method);
    const rows = runs.filter((row) => row.run === run.label);
    if (rows.length) add(method, run.label, rows);
  }
  const head = ["", "", "value", "range", panel.axis === "epoch" ? "epoch" : "at"];
  const title = make("tr", {}, ...head.map((text) => make("th", { textContent: text })));
  showTip(event.clientX, event.clientY, make("table", {}, title, ...lines));
  lineOf(figure).style.left = `${left}px`;
  lineOf(figure).hidden = false;
}

function lineOf(figure) {
  const chart = figure.querySelector(".chart");
  return chart.querySelector(".cursor") ?? chart.appendChild(make("div", { className: "cursor", hidden: true }));
}

function watch(figure) {
  if (figure.dataset.watched) return;
  figure.dataset.watched = "yes";
  const chart = figure.querySelector(".chart");
  const element = figure.closest(".curves");
  let from = null;
  chart.addEventListener("pointermove", (event) => {
    showTooltip(figure, event);
    if (from === null) return;
    const brush = chart.querySelector(".brush") ?? chart.appendChild(make("div", { className: "brush" }));
    const { left } = valueAt(figure, event.clientX);
    Object.assign(brush.style, { left: `${Math.min(left, from.left)}px`, width: `${Math.abs(left - from.left)}px` });
  });
  chart.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) from = valueAt(figure, event.clientX);
    else showTooltip(figure, event);
  });
  addEventListener("pointerup", (event) => {
    if (from === null || !views.has(figure)) return;
    const to = valueAt(figure, event.clientX);
    chart.querySelector(".brush")?.remove();
    if (Math.abs(to.left - from.left) > 8) zoomTo(element, Math.min(from.value, to.value), Math.max(from.value, to.value));
    from = null;
  });
  chart.addEventListener("pointerleave", () => {
    hideTip();
    lineOf(figure).hidden = true;
  });
  chart.addEventListener("dblclick", () => MOVES["0"](element));
  chart.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const [low, high] = views.get(figure).scale("x").range();
    const { left } = valueAt(figure, event.clientX);
    const at = (left - views.get(figure).origin()[0]) / (high - low);
    move(element, event.deltaY < 0 ? 0.8 : 1.25, 0, at);
  }, { passive: false });
}
