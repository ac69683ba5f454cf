// At the start, and before printing: every chart that can be seen is drawn at once.

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("main details")) details.open = true;
  for (const figure of document.querySelectorAll("main figure")) draw(figure);
});

setTheme(stored.get() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
for (const element of document.querySelectorAll("main .curves")) addPanel(element);
for (const figure of document.querySelectorAll("main figure")) seen.observe(figure);
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", drawTheRest);
followHash();
addEventListener("load", () => setTimeout(drawTheRest, 200));
