// The drawer of a run, opened by a link such as #run=demo/noise40-sam-seed0.

const drawer = document.getElementById("drawer");

function listOf(title, entries, changed = []) {
  const lines = entries.flatMap(([name, text]) => [
    make("dt", { textContent: name }),
    make("dd", { textContent: text + (changed.includes(name) ? " (not the recipe's)" : "") }),
  ]);
  return make("section", {}, make("h3", { textContent: title }), make("dl", {}, ...lines));
}

function curvesOfRun(id, run) {
  const series = data.series[run.series];
  const own = series.runs.find((one) => one.id === id);
  const panel = document.getElementById("panel").content.firstElementChild.cloneNode(true);
  panel.dataset.series = run.series;
  for (const figure of panel.querySelectorAll("figure")) if (!own?.values[figure.dataset.curve]) figure.remove();
  const others = series.methods.map((method) => method.title).filter((title) => title !== own?.method);
  return own ? { panel, options: { hidden: others, chosen: new Set([id]) } } : null;
}

function openDrawer(id) {
  const run = data.runs[id];
  const close = make("button", { type: "button", textContent: "Close", onclick: () => drawer.close() });
  const parts = [make("header", {}, make("h2", { id: "drawer-title", textContent: id }), close)];
  if (run.command) {
    const button = make("button", { type: "button", className: "copy", textContent: "Copy", data: { text: run.command } });
    parts.push(make("p", { className: "command" }, make("code", { textContent: run.command }), " ", button));
  }
  const curves = curvesOfRun(id, run);
  parts.push(listOf("Result", run.result));
  if (curves) parts.push(make("section", {}, make("h3", { textContent: "Curves, with the mean and range of its method" }), curves.panel));
  parts.push(listOf("Configuration", Object.entries(run.config), run.changed), listOf("Receipt", run.receipt));
  drawer.querySelector(".inside").replaceChildren(...parts);
  if (!drawer.open) drawer.showModal();
  drawer.querySelector(".inside").scrollTop = 0;
  if (!curves) return;
  addPanel(curves.panel, curves.options);
  for (const figure of figuresOf(curves.panel)) draw(figure);
}

function followHash() {
  if (!drawer) return;
  const id = location.hash.startsWith("#run=") ? decodeURIComponent(location.hash.slice(5)) : null;
  if (id !== null && Object.hasOwn(data.runs ?? {}, id)) openDrawer(id);
  else if (drawer.open) drawer.close();
}

if (drawer) {
  drawer.addEventListener("close", () => {
    for (const element of [...panels.keys()].filter((one) => drawer.contains(one))) {
      for (const figure of figuresOf(element)) views.get(figure)?.finalize(), views.delete(figure);
      panels.delete(element);
    }
    drawer.querySelector(".inside").replaceChildren();
    if (location.hash.startsWith("#run=")) history.replaceState(null, "", location.pathname + location.search);
  });
  drawer.addEventListener("click", (event) => { if (event.target === drawer) drawer.close(); });
  addEventListener("hashchange", followHash);
}
