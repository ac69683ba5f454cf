// Charts: drawn by Vega when they come into sight, when there is time, or when the page is printed. Vega waits for
// nothing but promises, so that they are there before the printer looks.

const views = new Map(); // figure → Vega's view
const NARROW = 560; // pixels
const FONTS = { axis: { labelFontSize: 11, titleFontSize: 11 }, legend: { labelFontSize: 11 } };

function isNarrow(figure) {
  return figure.querySelector(".chart").clientWidth < NARROW;
}

function contentsOf(figure) {
  if (figure.dataset.curve) return curveOf(figure);
  const { wide, narrow } = data.charts[Number(figure.dataset.chart)];
  return { spec: narrow && isNarrow(figure) ? narrow : wide, tables: data.datasets };
}

async function embed(element, { spec, tables }) {
  const filled = spec.data.map((one) => (Object.hasOwn(tables, one.name) ? { ...one, values: tables[one.name] } : one));
  const { view } = await vegaEmbed(element, { ...spec, data: filled }, {
    mode: "vega", renderer: "svg", actions: false, defaultStyle: false, tooltip: showMark, config: FONTS,
  });
  return view;
}

// A figure that is the whole page reaches down to its end.

function heightOf(figure) {
  if (!figure.closest(".alone")) return null;
  return Math.max(240, innerHeight - figure.querySelector(".chart").getBoundingClientRect().top - (figure.dataset.curve ? 80 : 130));
}

async function draw(figure) {
  if (figure.offsetParent === null || figure.dataset.drawn) return;
  seen.unobserve(figure);
  figure.dataset.drawn = "begun";
  const { spec, tables } = contentsOf(figure);
  const shown = { ...spec, background: "transparent", height: heightOf(figure) ?? spec.height };
  views.set(figure, await embed(figure.querySelector(".chart"), { spec: shown, tables }));
  if (!figure.querySelector(".saves")) figure.querySelector("figcaption").append(saves(figure));
  if (figure.dataset.curve) watch(figure);
  figure.dataset.drawn = "yes";
}

async function redraw(figure) {
  while (figure.dataset.drawn === "begun") await new Promise((resolve) => setTimeout(resolve, 10));
  views.get(figure)?.finalize();
  views.delete(figure);
  delete figure.dataset.drawn;
  await draw(figure);
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) draw(target);
}, { rootMargin: "300px" });

async function drawTheRest() {
  for (const figure of document.querySelectorAll("figure")) {
    if (figure.dataset.drawn) continue;
    await new Promise((resolve) => setTimeout(resolve, 20));
    await draw(figure);
  }
}

addEventListener("resize", () => {
  for (const figure of views.keys()) {
    const forms = data.charts[Number(figure.dataset.chart)];
    if (!forms?.narrow || figure.offsetParent === null) continue;
    const now = isNarrow(figure) ? "narrow" : "wide";
    if ((figure.dataset.form ?? now) !== now) redraw(figure);
    figure.dataset.form = now;
  }
});

// A picture for a file: with titles and a legend, on white.

async function picture(figure, form) {
  const { spec, tables } = figure.dataset.curve ? curveOf(figure, true) : contentsOf(figure);
  const made = { ...spec, background: "white", width: figure.dataset.curve || !isNarrow(figure) ? 720 : 380 };
  made.signals = spec.signals.filter((signal) => signal.name !== "width"); // which is the container's
  made.title = { text: figure.getAttribute("aria-label") };
  const view = await embed(make("div"), { spec: made, tables });
  if (form === "svg") return new Blob([await view.toSVG()], { type: "image/svg+xml" });
  const canvas = await view.toCanvas(2);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

async function save(figure, form) {
  const name = figure.getAttribute("aria-label").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  const link = make("a", { href: URL.createObjectURL(await picture(figure, form)), download: `${name || "chart"}.${form}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function saves(figure) {
  const label = figure.getAttribute("aria-label");
  const buttons = ["svg", "png"].map((form) => make("button", {
    type: "button", textContent: form.toUpperCase(), onclick: () => save(figure, form),
    aria: { label: `Save as ${form.toUpperCase()}: ${label}` },
  }));
  return make("span", { className: "saves" }, ...buttons);
}

// One tooltip for the page.

const tip = document.getElementById("tip");

function showTip(x, y, ...children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y - height / 2, innerHeight - height - 4))}px`;
}

function hideTip() {
  tip.hidden = true;
}

function showMark(handler, event, item, value) {
  if (value === null || value === undefined || value === "") return hideTip();
  const entries = typeof value === "object" ? Object.entries(value) : [["", value]];
  const lines = entries.map(([name, text]) =>
    make("tr", {}, make("th", { textContent: name === "in words" ? "" : name }), make("td", { textContent: text })));
  showTip(event.clientX, event.clientY, make("table", {}, ...lines));
}
