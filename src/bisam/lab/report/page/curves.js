// A panel of curves: one legend, one horizontal axis and one zoom for all of its figures.

const panels = new Map(); // element → state

function curveOf(figure, forFile = false) {
  const panel = panels.get(figure.closest(".curves"));
  const name = figure.dataset.curve;
  const isLog = panel.log && data.logarithmic.includes(name);
  const spec = structuredClone(data.curve);
  const tables = tablesOf(panel.series, name, panel.chosen);
  const signals = signalsOf(panel, tables, isLog);
  spec.signals = spec.signals.filter((signal) => !(signal.name in signals));
  for (const [name, value] of Object.entries(signals)) spec.signals.push({ name, value });
  const methods = panel.series.methods;
  const scales = {
    color: { domain: methods.map((method) => method.title), range: methods.map((method) => method.colour) },
    strokeDash: { domain: methods.map((method) => method.title), range: methods.map((method) => method.dash) },
    x: { domain: { signal: "across" } },
    y: { domain: { signal: "upwards" }, ...(isLog ? { type: "log" } : {}) },
  };
  for (const scale of spec.scales) Object.assign(scale, scales[scale.name]);
  const words = data.axes[panel.axis];
  const titles = { x: forFile ? words : words.split(/(?<=,) /), y: forFile ? data.titles[name] : undefined }; // lines fit a phone
  for (const axis of spec.axes) if (!axis.grid) axis.title = titles[axis.scale];
  spec.autosize = { ...spec.autosize, resize: true }; // for labels that a zoom makes longer
  if (!forFile) spec.legends = [];
  if (isLog) for (const key of ["means", "runs"]) tables[key] = tables[key].filter((row) => (row.least ?? row.value) > 0);
  return { spec, tables };
}

function figuresOf(element) {
  return [...element.querySelectorAll("figure")];
}

// The axes span what is to be seen: the range that is chosen, and the values of the methods in it.

function signalsOf(panel, { means, runs }, isLog) {
  const { axis, hidden } = panel;
  const [low, high] = [panel.low ?? -Infinity, panel.high ?? Infinity];
  const shown = [...means, ...runs].filter((row) => row[axis] !== null && !hidden.has(row.method));
  const inside = shown.filter((row) => row[axis] >= low && row[axis] <= high);
  const values = inside.flatMap((row) => [row.least ?? row.value, row.most ?? row.value]).filter((value) => !isLog || value > 0);
  const span = (numbers) => (numbers.length ? numbers.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]) : [1, 2]);
  const [first, last] = span(shown.map((row) => row[axis]));
  return { axis, hidden: [...hidden], across: [Math.max(low, first), Math.min(high, last)], upwards: span(values) };
}

// Signals change what is drawn already; a new axis or scale needs a new chart.

function update(element) {
  const panel = panels.get(element);
  for (const figure of figuresOf(element)) {
    const view = views.get(figure);
    if (!view) continue;
    const name = figure.dataset.curve;
    const signals = signalsOf(panel, tablesOf(panel.series, name, panel.chosen), panel.log && data.logarithmic.includes(name));
    for (const [signal, value] of Object.entries(signals)) view.signal(signal, value);
    view.run();
  }
}

function rebuild(element) {
  for (const figure of figuresOf(element)) if (views.has(figure)) redraw(figure);
}

function swatch({ colour, dash }) {
  const svg = document.getElementById("swatch").content.firstElementChild.cloneNode(true);
  svg.firstElementChild.setAttribute("stroke", colour);
  svg.firstElementChild.setAttribute("stroke-dasharray", dash.join(" "));
  return svg;
}

function addLegend(element, panel) {
  const toggle = (button, title) => {
    panel.hidden.has(title) ? panel.hidden.delete(title) : panel.hidden.add(title);
    button.setAttribute("aria-pressed", String(!panel.hidden.has(title)));
    update(element);
  };
  for (const method of panel.series.methods) {
    const seeds = method.n === 1 ? "1 run" : `mean and range of ${method.n} runs`;
    const button = make("button", {
      type: "button", title: method.n ? seeds : "no mean: its runs are drawn one by one",
      aria: { pressed: String(!panel.hidden.has(method.title)) },
      onclick: () => toggle(button, method.title),
    }, swatch(method), ` ${method.title}`);
    element.querySelector(".legend").append(button);
  }
}

function addPanel(element, { hidden = [], chosen = pinned } = {}) {
  const series = data.series[Number(element.dataset.series)];
  const panel = { series, chosen, hidden: new Set(hidden), axis: element.dataset.axis, log: false, low: null, high: null };
  panels.set(element, panel);
  addLegend(element, panel);
  const axis = element.querySelector(".axis");
  for (const name of ["gradients", "seconds"]) {
    if (!series.methods.some((method) => method[name])) axis.querySelector(`[value=${name}]`).remove();
  }
  axis.addEventListener("change", () => {
    Object.assign(panel, { axis: axis.value, low: null, high: null });
    rebuild(element);
  });
  element.querySelector(".log").parentElement.hidden = !figuresOf(element).some((one) => data.logarithmic.includes(one.dataset.curve));
  element.querySelector(".log").addEventListener("change", (event) => {
    panel.log = event.target.checked;
    rebuild(element);
  });
  const buttons = [["+", "+", "Zoom in"], ["-", "−", "Zoom out"], ["l", "Last fifth", "Show the last fifth"],
    ["0", "All", "Show all epochs"]];
  for (const [key, text, label] of buttons) {
    const button = make("button", { type: "button", textContent: text, title: label, aria: { label } });
    button.addEventListener("click", () => MOVES[key](element));
    element.querySelector(".zooms").append(button);
  }
}
