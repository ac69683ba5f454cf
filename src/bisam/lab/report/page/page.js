"use strict";

const { charts, datasets } = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const views = new Map(); // figure → vega view
const whole = new Map(); // figure → all epochs

// Light and dark: the reader's choice if there is one, else the system's.

const stored = {
  get: () => { try { return localStorage.getItem("bisam-theme"); } catch { return null; } },
  set: (name) => { try { localStorage.setItem("bisam-theme", name); } catch { /* a page from disk may not store */ } },
};

function setTheme(theme) {
  root.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme";
}

document.getElementById("theme").addEventListener("click", () => {
  const next = root.dataset.theme === "dark" ? "light" : "dark";
  stored.set(next);
  setTheme(next);
});

// Charts are drawn when they come into sight, the others when there is time. Their colours follow the page's style.

async function draw(figure) {
  seen.unobserve(figure);
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "begun";
  const spec = charts[Number(figure.dataset.chart)];
  const { view } = await vegaEmbed(figure.querySelector(".chart"), spec, {
    renderer: "svg",
    config: { background: "transparent" },
    patch: (made) => {
      for (const data of made.data) if (Object.hasOwn(datasets, data.name)) data.values = datasets[data.name];
      return made;
    },
    actions: { export: true, source: false, compiled: false, editor: false },
  });
  views.set(figure, view);
  figure.querySelector(".chart summary")?.setAttribute("aria-label", `Save: ${figure.getAttribute("aria-label")}`);
  if (zooms(view)) {
    whole.set(figure, view.scale("x").domain());
    addTools(figure);
    view.addSignalListener(ZOOM, (_, to) => follow(figure, to));
  }
  figure.dataset.drawn = "yes";
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) draw(target);
}, { rootMargin: "300px" });

async function drawTheRest() {
  for (const figure of document.querySelectorAll("figure")) {
    if (figure.offsetParent !== null) await draw(figure);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

// Zoom: by Ctrl and the wheel, by dragging, by buttons, by keys. Figures side by side follow each other.

const ZOOM = "zoom_epoch";

function zooms(view) {
  return Object.hasOwn(view.getState().signals, ZOOM);
}

function domain(figure) {
  const view = views.get(figure);
  const now = view && zooms(view) ? view.signal(ZOOM) : null;
  return now && now.length === 2 ? [...now] : null;
}

async function zoomTo(figure, to) {
  const view = views.get(figure);
  if (String(view.signal(ZOOM)) !== String(to)) await view.signal(ZOOM, to).runAsync();
}

function follow(figure, to) {
  for (const other of figure.closest(".figures")?.querySelectorAll("figure") ?? []) {
    if (other !== figure && views.has(other) && zooms(views.get(other))) zoomTo(other, to);
  }
}

function move(figure, scale, shift) {
  const view = views.get(figure);
  const [low, high] = domain(figure) ?? view.scale("x").domain();
  const [first, last] = whole.get(figure);
  const width = Math.min((high - low) * scale, last - first);
  const start = (low + high - width) / 2 + shift * (high - low);
  const kept = Math.min(Math.max(start, first), last - width);
  zoomTo(figure, [kept, kept + width]);
}

const MOVES = {
  "+": (figure) => move(figure, 0.5, 0),
  "-": (figure) => move(figure, 2, 0),
  "0": (figure) => zoomTo(figure, null),
  ArrowLeft: (figure) => move(figure, 1, -0.25),
  ArrowRight: (figure) => move(figure, 1, 0.25),
};

function addTools(figure) {
  if (figure.querySelector(".tools")) return;
  const tools = document.createElement("div");
  tools.className = "tools";
  for (const [key, text, label] of [["+", "+", "Zoom in"], ["-", "−", "Zoom out"], ["0", "All", "Show all epochs"]]) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, title: label });
    button.setAttribute("aria-label", `${label}: ${figure.getAttribute("aria-label")}`);
    button.addEventListener("click", () => MOVES[key](figure));
    tools.append(button);
  }
  figure.append(tools);
}

document.addEventListener("keydown", (event) => {
  const figure = event.target.closest?.("figure");
  if (figure !== event.target || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key === "=" ? "+" : event.key;
  if (views.has(figure) && zooms(views.get(figure)) && Object.hasOwn(MOVES, key)) {
    event.preventDefault();
    MOVES[key](figure);
  }
});

// Choices and filters.

for (const choice of document.querySelectorAll(".choice")) {
  choice.querySelector("select")?.addEventListener("change", (event) => {
    [...choice.querySelectorAll(":scope > .option")].forEach((option, at) => {
      option.hidden = at !== event.target.selectedIndex;
    });
    drawTheRest();
  });
}

for (const input of document.querySelectorAll(".search input")) {
  const rows = [...input.closest(".grid").querySelectorAll("tbody tr")];
  const count = input.parentElement.querySelector("output");
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.value = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  });
}

window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("main details")) if (!details.closest(".chart")) details.open = true;
});

setTheme(stored.get() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
for (const figure of document.querySelectorAll("figure")) seen.observe(figure);
window.addEventListener("load", () => setTimeout(drawTheRest, 200));
