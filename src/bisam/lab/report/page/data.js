"use strict";

// What the page was given, and the rows that its curves are drawn from.

const data = JSON.parse(document.getElementById("data").textContent);
const pinned = new Set(); // names of runs that are drawn as lines of their own

function make(tag, properties = {}, ...children) {
  const { aria = {}, data: own = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  Object.assign(element.dataset, own);
  element.append(...children);
  return element;
}

// The places of the epochs on an axis: of gradient evaluations and seconds one number, if each epoch has as much.

function placesOf(columns, axis) {
  const places = columns[axis] ?? null;
  return typeof places === "number" ? columns.epoch.map((epoch) => epoch * places) : places;
}

function rowsOf(columns, name, more) {
  const values = columns.values[name] ?? [];
  const [gradients, seconds] = ["gradients", "seconds"].map((axis) => placesOf(columns, axis));
  return columns.epoch.flatMap((epoch, at) => {
    if (values[at] === null || values[at] === undefined) return [];
    const row = { epoch, gradients: gradients?.[at] ?? null, seconds: seconds?.[at] ?? null, value: values[at] };
    return [{ ...row, ...more(at, values[at]) }];
  });
}

// Means with their bands, and the single runs that are to be seen: chosen ones, and those of methods without a mean.

function tablesOf(series, name, chosen = pinned) {
  const means = series.methods.flatMap((method) => rowsOf(method, name, (at, value) => ({
    method: method.title,
    least: method.low[name]?.[at] ?? value,
    most: method.high[name]?.[at] ?? value,
  })));
  const isShort = (method) => means.filter((row) => row.method === method).length < 2;
  const shown = series.runs.filter((run) => chosen.has(run.id) || isShort(run.method));
  const runs = shown.flatMap((run) =>
    rowsOf(run, name, () => ({ method: run.method, run: run.label })));
  return { means, runs };
}
