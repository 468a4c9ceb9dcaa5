// Draws curves of metrics as SVG: one picture for each metric, one line for each run. No library.
"use strict";
const WIDTH = 380, HEIGHT = 200, LEFT = 56, BOTTOM = 24, TOP = 22, RIGHT = 12;
const FIRST = ["train/loss", "val/loss", "val/acc1", "train/acc1", "val/auc", "lr", "perf/samples_per_s"];

function svg(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// The points of a metric: [step, value], without those that are not finite.
function values(points, metric) {
  return points.filter((one) => Number.isFinite(one.metrics[metric])).map((one) => [one.step, one.metrics[metric]]);
}

// The metrics that are drawn: those of training and validation that have two values, the usual ones first.
function drawn(runs) {
  const names = new Set(runs.flatMap((run) => run.points.flatMap((one) => Object.keys(one.metrics))));
  const place = (name) => FIRST.indexOf(name) < 0 ? FIRST.length : FIRST.indexOf(name);
  return [...names].filter((name) => !/^(system|server|worker)/.test(name))
    .filter((name) => runs.some((run) => values(run.points, name).length > 1))
    .sort((a, b) => place(a) - place(b) || a.localeCompare(b)).slice(0, 9);
}

function round(value) {
  if (value === 0) return "0";
  const isShort = Math.abs(value) < 1e5 && Math.abs(value) >= 1e-3;
  return isShort ? String(+value.toPrecision(3)) : value.toExponential(1);
}

// runs: [{ label, points }], points as the API answers them. Lines have the classes line0 to line5.
function curves(box, runs) {
  box.replaceChildren(...drawn(runs).map((metric) => picture_of(metric, runs)));
}

function picture_of(metric, runs) {
  const lines = runs.map((run) => values(run.points, metric));
  const all = lines.flat(), steps = all.map((p) => p[0]), numbers = all.map((p) => p[1]);
  const low = Math.min(...numbers), high = Math.max(...numbers), last = Math.max(...steps, 1);
  const x = (step) => LEFT + (step / last) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low || 1)) * (HEIGHT - BOTTOM - TOP);
  const ends = runs.map((run, n) => lines[n].length ? `${run.label} ${round(lines[n].at(-1)[1])}` : "").filter(Boolean);
  const about = { role: "img", "aria-label": `${metric}: ${ends.join(", ")}` };
  const made = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, ...about });
  svg("text", { x: LEFT, y: 14, class: "title" }, made).textContent = metric;
  for (const value of low === high ? [low] : [low, (low + high) / 2, high]) {
    svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "grid" }, made);
    svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, made).textContent = round(value);
  }
  svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, made).textContent = `update ${last}`;
  lines.forEach((points, n) => {
    const path = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const line = svg("polyline", { points: path, class: `line${n % 6}` }, made);
    svg("title", {}, line).textContent = `${runs[n].label}: ${points.length ? round(points.at(-1)[1]) : ""}`;
    if (!points.length) return;
    const [step, value] = points.at(-1);
    svg("circle", { cx: x(step), cy: y(value), r: 3, class: `line${n % 6}` }, made);
  });
  return made;
}
