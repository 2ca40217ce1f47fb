// Every metric as a chart, by group, the chosen runs overlaid. Only charts in sight are loaded and drawn.

import { draw, smoothed, xText, yText } from "dash/chart.js";
import { debounced, el, isDark, newest, number, replace, setText } from "dash/dom.js";
import { change, read } from "dash/state.js";
import { marksOf } from "dash/marks.js";

const FIRST = ["critic/score/mean", "reward/correct", "val/loss", "train/loss", "train/accuracy", "response_length/mean", "actor/entropy", "actor/grad_norm", "perf/throughput", "train/tokens_per_s"];

export function mount(root, context) {
  let [runs, metrics, marks, stamp, isHeld] = [[], new Map(), new Map(), "", false];
  let generation = 0; // counts how often there was something new; a card remembers of which it shows the values
  const cards = new Map();
  const asked = newest();
  const search = el("input", { type: "search", placeholder: "find metrics", "aria-label": "find metrics" });
  const axis = el("select", { "aria-label": "x axis" }, [["step", "by step"], ["tokens", "by tokens"], ["time", "by time"]].map(([value, label]) => el("option", { value }, label)));
  const smooth = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", "aria-label": "smoothing" });
  const smoothText = el("output", { class: "muted" });
  const log = el("input", { type: "checkbox" });
  const whole = el("button", { class: "plain", hidden: true, onclick: () => change({ from: null, to: null }) }, "whole range");
  const groups = el("div", { class: "groups" });
  const empty = el("div", { class: "empty", hidden: true }, "Choose one or more runs to see their curves.");
  search.addEventListener("input", debounced(() => change({ q: search.value || null }, true)));
  axis.addEventListener("change", () => change({ x: axis.value === "step" ? null : axis.value, from: null, to: null }));
  smooth.addEventListener("input", debounced(() => change({ smooth: Number(smooth.value) ? smooth.value : null }, true), 60));
  log.addEventListener("change", () => change({ log: log.checked ? "1" : null }));
  replace(root, el("div", { class: "tools" }, search, axis, el("label", {}, "smooth ", smooth, smoothText), el("label", {}, log, " log"), whole), empty, groups);

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const card = cards.get(entry.target.dataset.metric);
      if (card) card.inSight = entry.isIntersecting;
    }
    load();
  }, { rootMargin: "300px" });

  async function update(state) {
    search.value !== (state.q ?? "") && document.activeElement !== search && (search.value = state.q ?? "");
    axis.value = state.x ?? "step";
    smooth.value = state.smooth ?? 0;
    setText(smoothText, Number(smooth.value) ? Number(smooth.value).toFixed(2) : "");
    log.checked = Boolean(state.log);
    whole.hidden = !state.from && !state.to;
    await look(true);
  }

  const tick = () => look(false);

  /** What the chosen runs have now. The charts are drawn again where the reader asked for something else, or a run has got on. */
  async function look(anew) {
    const isNewest = asked();
    const found = await context.chosen();
    const before = JSON.stringify(runs.map((run) => [run.id, run.step]));
    if (!isNewest() || (!anew && JSON.stringify(found.map((run) => [run.id, run.step])) === before)) return;
    const [names, happened] = await Promise.all([
      Promise.all(found.map((run) => context.api.metrics(run.id).catch(() => []))),
      Promise.all(found.map((run) => context.api.events(run.id).catch(() => ({ events: [], stalls: [] })))),
    ]);
    if (!isNewest()) return;
    runs = found;
    metrics = new Map();
    names.flat().forEach((metric) => metrics.has(metric.name) || metrics.set(metric.name, metric));
    marks = new Map(runs.map((run, k) => [run.id, marksOf(happened[k])]));
    empty.hidden = runs.length > 0;
    groups.hidden = !runs.length;
    layOut(read().q ?? "");
    generation += 1;
    await load();
  }

  /** The cards, in groups; only built anew when there are other metrics than before. */
  function layOut(filter) {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = [...metrics.values()].filter((m) => words.every((word) => `${m.name} ${m.meaning} ${m.section}`.toLowerCase().includes(word)));
    const key = JSON.stringify(fits.map((m) => m.name));
    if (key === stamp) return;
    stamp = key;
    cards.forEach((card) => card.close());
    cards.clear();
    seen.disconnect();
    const first = words.length ? [] : fits.filter((m) => FIRST.includes(m.name) || /^val\/.+\/acc\/mean@/.test(m.name)).slice(0, 8);
    const sections = new Map(first.length ? [["Overview", first]] : []);
    fits.filter((m) => !first.includes(m)).forEach((m) => sections.set(m.section, [...(sections.get(m.section) ?? []), m]));
    replace(groups, [...sections].map(([title, own]) => {
      const grid = el("div", { class: "grid" }, own.map(makeCard));
      return el("details", { open: true }, el("summary", {}, el("h2", {}, title), el("span", { class: "muted" }, ` ${own.length}`)), grid);
    }));
    if (!fits.length && runs.length) replace(groups, el("div", { class: "empty" }, metrics.size ? "No metric is called that." : "No step has been recorded yet."));
    cards.forEach((card) => seen.observe(card.node));
  }

  function makeCard(metric) {
    const box = el("div", { class: "plot" });
    const legend = el("ul", { class: "legend" });
    const at = el("span", { class: "muted at", "aria-live": "polite" });
    const node = el("section", { class: "card", dataset: { metric: metric.name } },
      el("header", {}, el("h3", { title: metric.meaning }, metric.name), el("span", { class: "unit" }, metric.unit), at),
      el("p", { class: "meaning" }, metric.meaning), box, legend);
    cards.set(metric.name, { metric, node, box, legend, at, inSight: false, close() { this.chart?.close(); } });
    return node;
  }

  async function load() {
    const own = generation;
    const due = [...cards.values()].filter((card) => card.inSight && card.shown !== own && card.loading !== own);
    if (!due.length || !runs.length || isHeld) return;
    due.forEach((card) => { card.loading = own; });
    const state = read();
    const [from, to] = [state.from, state.to].map((value) => (value === undefined ? undefined : Number(value)));
    const x = state.x ?? "step";
    const names = due.map((card) => card.metric.name);
    const found = await Promise.all(runs.map((run) => context.api.series(run.id, names, x, from, to, 1200).catch(() => ({}))));
    due.forEach((card) => { card.loading = null; });
    if (own !== generation || isHeld) return;
    const options = { x, from, to, log: Boolean(state.log), smooth: Number(state.smooth ?? 0) };
    for (const card of due) {
      card.shown = own;
      drawCard(card, found, options);
    }
  }

  /** While a range is being dragged, nothing moves under the hand. */
  const hold = (held) => {
    isHeld = held;
    if (!held) load();
  };
  const release = () => isHeld && hold(false);
  groups.addEventListener("pointerdown", (event) => { if (event.target.closest(".plot")) hold(true); });
  addEventListener("pointerup", release);
  addEventListener("pointercancel", release);

  function drawCard(card, found, options) {
    const lines = runs.flatMap((run, k) => {
      const points = found[k][card.metric.name];
      return points?.x.length ? [{ ...points, label: run.name, color: run.color, marks: options.x === "step" ? marks.get(run.id) : [] }] : [];
    });
    card.node.dataset.points = String(lines.reduce((sum, line) => sum + line.x.length, 0));
    const last = lines.map((line) => smoothed(line, options.smooth).at(-1));
    card.node.dataset.last = last.map((value) => number(value)).join(" ");
    const look = JSON.stringify([options, card.box.clientWidth, isDark()]);
    if (card.look === look && card.chart?.set(lines)) {
      card.last = last;
      if (!card.cursor) card.say(null);
      return;
    }
    card.chart?.close();
    replace(card.box);
    card.node.classList.toggle("none", !lines.length);
    Object.assign(card, { look, last, cursor: null });
    const items = lines.map((line) => {
      const dot = el("span", { class: "dot" });
      dot.style.background = line.color;
      return el("li", {}, dot, el("span", { class: "label" }, line.label), el("b"));
    });
    replace(card.legend, items);
    card.say = (cursor) => {
      card.cursor = cursor;
      setText(card.at, cursor ? xText(options.x, cursor.x) : "");
      items.forEach((item, k) => setText(item.lastChild, yText(cursor ? cursor.y[k] : card.last[k], card.metric.unit)));
    };
    card.say(null);
    card.chart = draw(card.box, { ...options, unit: card.metric.unit, label: card.metric.name, onCursor: card.say, onZoom: (a, b) => change({ from: a === null ? null : Number(a.toPrecision(8)), to: b === null ? null : Number(b.toPrecision(8)) }) }, lines);
  }

  const resized = new ResizeObserver(debounced(() => {
    generation += 1;
    load();
  }, 150));
  resized.observe(root);
  return { update, tick, close() { seen.disconnect(); resized.disconnect(); removeEventListener("pointerup", release); removeEventListener("pointercancel", release); cards.forEach((card) => card.close()); } };
}
