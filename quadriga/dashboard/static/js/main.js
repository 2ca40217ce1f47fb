// The frame around the views: navigation, the chosen runs, the theme, and the heartbeat that keeps a live page live.

import { api, exported } from "dash/api.js";
import { colorOf, el, redraw, replace, setText } from "dash/dom.js";
import { change, read, VIEWS } from "dash/state.js";
import * as alarms from "dash/alarms.js";
import * as configuration from "dash/configuration.js";
import * as curves from "dash/curves.js";
import * as logs from "dash/logs.js";
import * as runs from "dash/runs.js";
import * as samples from "dash/samples.js";
import * as time from "dash/time.js";

const MODULES = { runs, curves, samples, time, configuration, alarms, logs };
const TITLES = { runs: "Runs", curves: "Curves", samples: "Samples", time: "Time", configuration: "Configuration", alarms: "Alarms", logs: "Logs" };
const HEARTBEAT_MS = 2000;

const main = document.getElementById("main");
const banner = document.getElementById("banner");
let mounted = null;
let known = { rows: [], now: 0 };

/** What the views share: the rows of the chosen runs, in the order chosen, each with its colour. */
const context = {
  api,
  isLive: !exported,
  say(text) {
    banner.hidden = !text;
    setText(banner, text ?? "");
  },
  async chosen() {
    const ids = read().runs;
    known = ids.length ? await api.runs({ ids: ids.join(","), limit: 500 }) : { rows: [], now: 0 };
    const rows = ids.map((id) => known.rows.find((row) => row.id === id)).filter(Boolean);
    const found = rows.map((row, place) => ({ ...row, place, color: colorOf(place) }));
    drawChips(ids, found);
    return found;
  },
};

function drawChips(ids, rows) {
  const bar = document.getElementById("chosen");
  if (!bar) return;
  const chips = () => ids.map((id) => {
    const row = rows.find((one) => one.id === id);
    const dot = el("span", { class: "dot" });
    if (row) dot.style.background = row.color;
    const remove = () => change({ runs: read().runs.filter((other) => other !== id) });
    return el("span", { class: "chip" }, dot, el("span", { class: "label", title: row?.folder }, row ? row.name : "gone"), row && row.state !== "finished" ? el("span", { class: `state ${row.state}` }, row.state) : null,
      el("button", { class: "plain", title: "remove from the view", "aria-label": `remove ${row ? row.name : id}`, onclick: remove }, "×"));
  });
  redraw(bar, [ids, rows.map((row) => [row.name, row.state, row.color])], () =>
    [ids.length ? chips() : el("span", { class: "muted" }, "No run is chosen. "), el("a", { href: "#runs", onclick: toRuns }, "choose runs")].flat());
}

function toRuns(event) {
  event.preventDefault();
  change({ view: "runs" });
}

function drawFrame() {
  const tabs = VIEWS.map((view) => {
    const go = (event) => {
      event.preventDefault();
      change({ view, from: null, to: null });
    };
    return el("a", { href: `#${view}`, dataset: { view }, onclick: go }, TITLES[view]);
  });
  const theme = el("button", { class: "plain", id: "theme", title: "light or dark", "aria-label": "switch between light and dark", onclick: switchTheme }, "◐");
  const place = exported ? `exported ${exported.date}` : "";
  replace(document.getElementById("top"),
    el("div", { class: "bar" }, el("a", { class: "brand", href: "#runs", onclick: toRuns }, mark(), "Quadriga"),
      el("nav", { "aria-label": "views" }, tabs), el("span", { class: "grow" }), el("span", { id: "pulse", class: "muted" }, place), theme),
    el("div", { id: "chosen", "aria-label": "chosen runs" }));
}

function mark() {
  return el("span", { class: "mark", "aria-hidden": "true" }, el("i"), el("i"), el("i"), el("i"));
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("quadriga theme", root.dataset.theme);
  } catch {
    // no storage: the choice lasts as long as the page
  }
  show(true);
}

async function show(anew = false) {
  const state = read();
  document.querySelectorAll("nav a").forEach((tab) => {
    if (tab.dataset.view !== state.view) tab.removeAttribute("aria-current");
    else {
      tab.setAttribute("aria-current", "page");
      const bar = tab.parentElement; // on a phone, not all tabs have room
      bar.scrollLeft = tab.offsetLeft - (bar.clientWidth - tab.offsetWidth) / 2;
    }
  });
  document.title = `${TITLES[state.view]} · Quadriga`;
  document.body.dataset.view = state.view;
  if (anew || mounted?.view !== state.view) {
    mounted?.close?.();
    replace(main);
    document.getElementById("chosen").dataset.key = "";
    mounted = { view: state.view, ...MODULES[state.view].mount(main, context) };
  }
  await guarded(() => mounted.update(state));
}

async function guarded(work) {
  try {
    await work();
    context.say("");
  } catch (error) {
    context.say(error.message);
    if (error.constructor === TypeError || error.constructor === ReferenceError) console.error(error);
  }
}

async function beat() {
  if (!document.hidden && !exported && mounted) {
    await guarded(() => mounted.tick?.(read()));
    setText(document.getElementById("pulse"), banner.hidden ? "live" : "");
  }
  setTimeout(beat, HEARTBEAT_MS);
}

function onKey(event) {
  if (event.key !== "/" || /^(input|select|textarea)$/i.test(event.target.tagName)) return;
  const search = main.querySelector("input[type=search]");
  if (search) {
    event.preventDefault();
    search.focus();
  }
}

try {
  const chosen = localStorage.getItem("quadriga theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // no storage: the system's theme
}
drawFrame();
addEventListener("hashchange", () => show());
addEventListener("keydown", onKey);
addEventListener("unhandledrejection", (event) => { // of what a click has asked for
  context.say(event.reason?.message ?? String(event.reason));
  event.preventDefault();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(true));
if (exported && !location.hash) change({ view: exported.table.rows.length === 1 ? "curves" : "runs", runs: exported.table.rows.slice(0, 8).map((row) => row.id) }, true);
show();
setTimeout(beat, HEARTBEAT_MS);
