// Light and dark: the reader's choice if there is one, else the system's.

const root = document.documentElement;

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
