// The page of the queue: lists runs, shows one of them, and asks for cancel, resume and retry.
// Every text is set as text (textContent), never as markup. The csrf value is kept by this origin alone.
"use strict";
const $ = (id) => document.getElementById(id);
let shown = null; // the number of the run that is shown
let follow = null; // ends the stream of its log
const compared = new Set(); // the numbers of the runs that are compared
const LIVE_MS = 3000; // between two questions for new points of the run that is shown

async function ask(path, options = {}) {
  const headers = { "x-csrf-token": localStorage.getItem("csrf") || "", ...options.headers };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) showLogin();
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({ error: answer.statusText }));
    throw new Error(said.error);
  }
  return answer;
}

function say(text) { $("said").textContent = text; }

function showLogin() {
  $("login").hidden = false;
  $("main").hidden = $("logout").hidden = true;
}

function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Reads server-sent events with fetch, because EventSource can send no csrf value.
async function events(path, signal, seen) {
  const reader = (await ask(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(block);
      if (found) seen(found[1], JSON.parse(found[2]));
    }
  }
}

function showRuns(state) {
  $("slots").textContent = state.hosts.map(({ host, free, all }) =>
    `${host}: ${free.cores.length} of ${all.cores.length} cores free, ` +
    `${free.gpus.length} of ${all.gpus.length} GPUs free`).join("; ");
  const focused = document.activeElement && document.activeElement.dataset.what;
  $("runs").replaceChildren(...state.runs.map((run) => {
    const row = document.createElement("tr");
    const box = element("input", "", element("td", "", row));
    box.type = "checkbox";
    box.checked = compared.has(run.number);
    box.dataset.what = `compare ${run.number}`;
    box.setAttribute("aria-label", box.dataset.what);
    box.addEventListener("change", () => { compared[box.checked ? "add" : "delete"](run.number); compare(); });
    button(element("td", "", row), String(run.number), `show ${run.number}`, () => show(run.number));
    element("td", run.state, row).className = run.state;
    element("td", run.by ? `${run.name} (${run.by})` : run.name, row);
    const at = run.progress;
    const isKnown = at && at.percent !== null;
    element("td", isKnown ? `${Math.round(at.percent)} %, update ${at.step} of ${at.total}` : "", row);
    element("td", run.position === null ? run.reason : `position ${run.position + 1}. ${run.reason}`, row);
    const cell = element("td", "", row);
    for (const verb of run.may) button(cell, verb, `${verb} ${run.number}`, () => act(run.number, verb));
    return row;
  }));
  const again = [...$("runs").querySelectorAll("[data-what]")].find((one) => one.dataset.what === focused);
  if (again) again.focus();
}

function button(parent, text, what, pressed) {
  const made = element("button", text, parent);
  made.dataset.what = what;
  made.setAttribute("aria-label", what);
  made.addEventListener("click", pressed);
}

async function act(number, verb) {
  try {
    say((await (await ask(`api/runs/${number}/${verb}`, { method: "POST" })).json()).said);
  } catch (error) { say(error.message); }
}

async function show(number) {
  if (follow) follow.abort();
  follow = new AbortController();
  shown = number;
  try {
    const run = await (await ask(`api/runs/${number}`)).json();
    if (shown !== number) return;
    $("detail").hidden = false;
    $("end").textContent = (run.result || {}).error || (run.state === "failed" ? run.reason : "");
    $("title").textContent = `Run ${run.number}: ${run.name}, ${run.state}`;
    $("title").focus();
    $("command").textContent = run.command;
    $("log").textContent = "";
    $("pictures").replaceChildren();
    $("curves").replaceChildren();
    draw(number, follow.signal).catch((error) => say(error.message));
    for (const path of run.pictures) picture(number, path);
    await events(`api/runs/${number}/logs?follow=true&last=65536`, follow.signal, (kind, data) => {
      if (kind !== "line" || shown !== number) return;
      const log = $("log");
      const atEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
      log.append(`${data}\n`);
      if (atEnd) log.scrollTop = log.scrollHeight;
    });
  } catch (error) { if (error.name !== "AbortError") say(error.message); }
}

function close() {
  if ($("detail").hidden) return;
  if (follow) follow.abort();
  const opener = document.querySelector(`[data-what="show ${shown}"]`);
  shown = null;
  $("detail").hidden = true;
  if (opener) opener.focus();
}

// All points of a run from a place in its file on; an object that is asked again with itself for later ones.
async function points(number, before = { points: [], next: 0 }) {
  for (;;) {
    const found = await (await ask(`api/runs/${number}/metrics?after=${before.next}`)).json();
    before = { points: found.start === 0 ? found.points : [...before.points, ...found.points], next: found.next };
    if (!found.points.length) return before;
  }
}

function labelled(number, found) {
  return { label: `run ${number}`, points: found.points };
}

async function draw(number, signal) {
  let found;
  while (!signal.aborted && shown === number) {
    const more = await points(number, found);
    if (shown !== number) return;
    if (!found || more.points.length !== found.points.length) curves($("curves"), [labelled(number, more)]);
    found = more;
    await new Promise((done) => setTimeout(done, LIVE_MS));
  }
}

// Why no curve has several of the runs; "" where one has.
function apart(lines) {
  const metrics = drawn(lines);
  if (!metrics.length) return "There are no curves: none of these runs has two points of a metric.";
  const isCommon = (metric) => lines.filter((line) => values(line.points, metric).length).length > 1;
  return metrics.some(isCommon) ? "" : "These runs have no metric in common, so each curve is of one run.";
}

async function compare() {
  const numbers = [...compared].sort((a, b) => a - b);
  const isOld = () => numbers.length !== compared.size || !numbers.every((number) => compared.has(number));
  $("compare").hidden = numbers.length < 2;
  if (numbers.length < 2) return;
  for (const id of ["legend", "beside", "differs"]) $(id).replaceChildren();
  $("common").textContent = "Loading the runs";
  try {
    const runs = await Promise.all(numbers.map(async (number) => (await ask(`api/runs/${number}`)).json()));
    const lines = await Promise.all(numbers.map(async (number) => labelled(number, await points(number))));
    if (isOld()) return;
    $("common").textContent = apart(lines);
    $("legend").replaceChildren(...numbers.map((number, n) => {
      const name = element("span", `run ${number}  `);
      name.className = `line${n % 6}`;
      return name;
    }));
    curves($("beside"), lines);
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
    const texts = (key) => runs.map((run) => JSON.stringify(run.config[key] ?? null));
    const rows = keys.filter((key) => !/^(hydra|name|launch.once)/.test(key)).map((key) => [key, ...texts(key)])
      .filter(([, ...cells]) => new Set(cells).size > 1);
    const bests = runs.map((run) => (run.result || {}).best || {});
    const best = [...new Set(bests.flatMap(Object.keys))].sort()
      .map((name) => [`best ${name}`, ...bests.map((one) => Number.isFinite(one[name]) ? round(one[name]) : "")]);
    const head = ["key", ...lines.map((line) => line.label)];
    $("differs").replaceChildren(...[head, ...best, ...rows].map((cells, n) => {
      const row = document.createElement("tr");
      for (const cell of cells) element(n ? "td" : "th", cell, row);
      return row;
    }));
  } catch (error) { if (!isOld()) $("common").textContent = `The runs cannot be compared: ${error.message}`; }
}

async function picture(number, path) {
  const parts = path.split("/").map(encodeURIComponent).join("/");
  const blob = await (await ask(`api/runs/${number}/files/${parts}`)).blob();
  if (shown !== number) return;
  const made = element("img", "", $("pictures"));
  made.alt = path;
  made.src = URL.createObjectURL(blob);
  made.addEventListener("load", () => URL.revokeObjectURL(made.src));
}

async function begin() {
  try {
    for (;;) {
      await events("api/events", undefined, (kind, state) => {
        $("login").hidden = true;
        $("main").hidden = $("logout").hidden = false;
        showRuns(state);
      });
    }
  } catch (error) {
    say($("login").hidden ? error.message : "Log in with a token. `python -m trainer serve` has printed the first one.");
    if ($("login").hidden) setTimeout(begin, 3000); // the service is away
  }
}

$("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const body = JSON.stringify({ token: $("token").value });
    const answer = await ask("login", { method: "POST", body, headers: { "content-type": "application/json" } });
    localStorage.setItem("csrf", (await answer.json()).csrf);
    $("token").value = "";
    $("login").hidden = true;
    say("");
    begin();
  } catch (error) { say(error.message); }
});
$("logout").addEventListener("click", async () => {
  localStorage.removeItem("csrf");
  await ask("logout", { method: "POST" });
  location.reload();
});
$("close").addEventListener("click", close);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
begin();
