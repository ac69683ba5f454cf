// Copying, sorting and filtering.

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // where a page from disk has no clipboard
    const area = make("textarea", { value: text });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  const form = button?.dataset.copy;
  const text = form ? data.exports[Number(button.parentElement.dataset.export)][form] : button?.dataset.text;
  if (text === undefined) return;
  const before = button.textContent;
  await copy(text);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
});

const runsTable = document.querySelector(".runs");

function numberOf(text) {
  const found = Number.parseFloat(text.replace("−", "-"));
  return Number.isNaN(found) ? null : found;
}

function compareTexts(a, b) {
  const [x, y] = [numberOf(a), numberOf(b)];
  if (x !== null && y !== null && x !== y) return x - y;
  if ((x === null) !== (y === null) && (a === "–" || b === "–")) return a === "–" ? 1 : -1;
  return a.localeCompare(b, "en", { numeric: true });
}

function sortBy(head) {
  const place = head.cellIndex;
  const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", direction);
  const body = head.closest("table").tBodies[0];
  const sign = direction === "ascending" ? 1 : -1;
  const text = (row) => row.cells[place].textContent.trim();
  body.append(...[...body.rows].sort((a, b) => {
    const [x, y] = [text(a), text(b)];
    return x === "–" || y === "–" ? compareTexts(x, y) : sign * compareTexts(x, y);
  }));
}

function filterRuns() {
  const wanted = [...runsTable.querySelectorAll("[data-filter]")].filter((select) => select.value);
  const words = runsTable.querySelector("[type=search]").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...runsTable.querySelectorAll("tbody tr")];
  for (const row of rows) {
    const fits = wanted.every((select) => row.dataset[select.dataset.filter] === select.value);
    const text = row.textContent.toLowerCase();
    row.hidden = !fits || !words.every((word) => text.includes(word));
  }
  const left = rows.filter((row) => !row.hidden).length;
  runsTable.querySelector("output").value = left < rows.length ? `${left} of ${rows.length}` : "";
}

function pin(id, isOn) {
  isOn ? pinned.add(id) : pinned.delete(id);
  for (const element of panels.keys()) {
    if (panels.get(element).series.runs.some((run) => run.id === id)) rebuild(element);
  }
}

if (runsTable) {
  runsTable.addEventListener("input", (event) => { if (event.target.closest(".filters")) filterRuns(); });
  runsTable.addEventListener("click", (event) => {
    if (event.target.matches(".sort")) sortBy(event.target.closest("th"));
  });
  runsTable.addEventListener("change", (event) => {
    if (event.target.matches(".pin")) pin(event.target.closest("tr").dataset.run, event.target.checked);
  });
}

for (const choice of document.querySelectorAll(".choice")) {
  choice.querySelector(".chooser")?.addEventListener("change", (event) => {
    [...choice.querySelectorAll(":scope > .option")].forEach((option, at) => {
      option.hidden = at !== event.target.selectedIndex;
    });
    drawTheRest();
  });
}
