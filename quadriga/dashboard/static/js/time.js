// Where the time goes: phases of each step, who waited for whom, memory and speed, and what held the run up.

import { draw, xText, yText } from "dash/chart.js";
import { colorOf, debounced, drawPicker, duration, el, isAlive, isDark, newest, number, redraw, replace, setText, tip } from "dash/dom.js";
import { marksOf } from "dash/marks.js";
import { change, pickedOf, read } from "dash/state.js";

const COLORS = { gen: 1, reward: 3, old_log_prob: 4, ref: 6, values: 8, teacher: 8, adv: 9, update_actor: 0, update_critic: 2, update_weights: 5, testing: 7, save_checkpoint: 6, replace_rollout: 5, "train/time_s": 0 };
/** A phase has the same colour wherever it is drawn, also when a worker does it. */
const phaseColor = (name) => colorOf(COLORS[name] ?? 9);
const [STEP, BETWEEN] = ["timing_s/step", ["timing_s/testing", "timing_s/save_checkpoint"]]; // the whole, and what follows it

const stepsOf = (points) => (points.n ?? points.x).reduce((sum, n) => sum + (points.n ? n : 1), 0);

/**
 * Seconds of a phase at each of the points `x`, which stand for `n` steps each (none given: for one). A phase that few steps
 * have, such as validation, is spread over the steps of its point: so the phases of a long run add up to the time of a step.
 */
export function perStep(points, x, n) {
  const seconds = x.map(() => 0);
  let at = 0;
  points.x.forEach((value, k) => {
    while (at < x.length - 1 && x[at] < value) at += 1;
    seconds[at] += points.y[k] * (points.n?.[k] ?? 1);
  });
  return seconds.map((sum, k) => sum / (n?.[k] ?? 1));
}

const OTHERS = /^(perf\/throughput|perf\/mfu|memory\/|train\/tokens_per_s|train\/time_s|perf\/max_memory_gb)/;

export function mount(root, context) {
  let [runs, charts, steps, isFull, leftOut, loaded, painted] = [[], new Map(), [], false, "", "", ""];
  const asked = newest();
  const phases = el("div", { class: "plot" });
  const legend = el("ul", { class: "legend wrap" });
  const at = el("span", { class: "muted at", "aria-live": "polite" });
  const grid = el("div", { class: "grid" });
  const canvas = el("canvas", { class: "lanes", role: "img", "aria-label": "timeline of the workers" });
  const step = el("input", { type: "range", min: "0", step: "1", "aria-label": "step of the timeline" });
  const [stepText, told, busy] = [el("output"), el("p", { class: "muted" }), el("ul", { class: "legend wrap" })];
  const listed = el("details", { hidden: true, ontoggle: () => drawList() }, el("summary", {}, "as a list"), el("div"));
  const events = el("div", { class: "heldup" });
  const [which, tools] = [el("span"), el("div", { class: "tools" })];
  tools.append(which);
  step.addEventListener("input", debounced(() => change({ step: steps[Number(step.value)] }, true), 60));
  const body = el("div", {},
    el("section", { class: "card wide" }, el("header", {}, el("h3", {}, "phases of each step"), el("span", { class: "unit" }, "s, stacked"), at), phases, legend),
    el("section", { class: "card wide" }, el("header", {}, el("h3", {}, "who works, who waits"), el("span", { class: "grow" }), el("span", { class: "stepper" }, step, stepText)), el("div", { class: "scroll" }, canvas), busy, told, listed),
    grid, events);
  const empty = el("div", { class: "empty", hidden: true }, "Choose a run to see where its time goes.");
  replace(root, tools, empty, body);

  async function update(state) {
    const isNewest = asked();
    const found = await context.chosen();
    const run = pickedOf(found);
    const timeline = run && (await context.api.timelineSteps(run.id).catch(() => ({ steps: [], full: false })));
    if (!isNewest()) return;
    runs = found;
    empty.hidden = Boolean(run);
    body.hidden = !run;
    drawPicker(which, runs, run, (of) => change({ of, step: null }, true));
    tools.hidden = runs.length < 2;
    if (!run) return;
    [steps, isFull, leftOut] = [timeline.steps, timeline.full, timeline.left_out ?? ""];
    const key = JSON.stringify([run.id, run.step, state.from, state.to, isDark(), root.clientWidth]);
    if (key !== loaded) await drawCharts(run, state, key, isNewest);
    await drawLanes(run, state, isNewest);
  }

  async function drawCharts(run, state, key, isNewest) {
    const names = await context.api.metrics(run.id).catch(() => []); // it may have ended before its first step
    const timed = names.filter((m) => m.name.startsWith("timing_s/"));
    const parts = timed.filter((m) => ![STEP, ...BETWEEN].includes(m.name));
    const own = parts.length ? timed.filter((m) => m.name !== STEP) : timed; // a step that is not divided is one phase
    const others = names.filter((m) => OTHERS.test(m.name)).sort((a, b) => a.name.startsWith("memory/") - b.name.startsWith("memory/"));
    const [from, to] = [state.from, state.to].map((value) => (value === undefined ? undefined : Number(value)));
    const [series, happened] = await Promise.all([names.length ? context.api.series(run.id, [...own, ...others].map((m) => m.name), "step", from, to, 800) : {}, context.api.events(run.id)]);
    if (!isNewest()) return;
    const look = JSON.stringify([run.id, from, to, isDark(), root.clientWidth, others.map((m) => m.name)]);
    if (look !== charts.look) {
      charts.forEach((chart) => chart.close());
      charts = Object.assign(new Map(), { look });
      replace(phases);
      replace(grid);
    }
    loaded = key;
    phases.parentElement.hidden = !own.length;
    const marks = marksOf(happened);
    const onZoom = (a, b) => change({ from: a === null ? null : Math.floor(a), to: b === null ? null : Math.ceil(b) });
    if (own.length) stacked(own, series, { from, to, onZoom, marks });
    for (const metric of others) if (series[metric.name]?.x.length > 1) single(metric, series[metric.name], { from, to, onZoom, marks });
    drawEvents(run, happened);
  }

  /** The chart of that name with these lines: the one that is there where it can show them, so that its cursor stays. */
  function place(name, box, options, lines) {
    const before = charts.get(name);
    if (before?.set(lines)) {
      Object.assign(before.options, options);
      if (!before.cursor) options.say(null);
      return;
    }
    before?.close();
    replace(box);
    const chart = { options: { ...options }, cursor: null };
    const onCursor = (cursor) => { chart.cursor = cursor; chart.options.say(cursor); };
    charts.set(name, Object.assign(chart, draw(box, { ...options, onCursor }, lines)));
    options.say(null);
  }

  /** Phases on top of each other: each line is the sum up to its phase, drawn from the top down. */
  function stacked(own, series, options) {
    const known = own.filter((m) => series[m.name]?.x.length);
    const densest = known.reduce((best, m) => (stepsOf(series[m.name]) > stepsOf(series[best.name]) ? m : best), known[0]);
    const x = known.length ? series[densest.name].x : [];
    const sum = x.map(() => 0);
    const lines = known.map((metric, place) => {
      const own_ = perStep(series[metric.name], x, series[densest.name].n);
      own_.forEach((seconds, k) => { sum[k] += seconds; });
      return { label: metric.name.slice(9).replaceAll("_", " "), color: phaseColor(metric.name.slice(9)), x, y: [...sum], own: own_, marks: place ? [] : options.marks };
    });
    const items = lines.map((line) => {
      const dot = el("span", { class: "dot" });
      dot.style.background = line.color;
      return el("li", {}, dot, el("span", { class: "label" }, line.label), el("b"));
    });
    replace(legend, items);
    const say = (cursor) => {
      const at_ = cursor ? x.indexOf(cursor.x) : x.length - 1;
      setText(at, cursor ? xText("step", cursor.x) : "");
      items.forEach((item, k) => setText(item.lastChild, at_ < 0 ? "" : duration(lines[k].own[at_])));
    };
    place("phases", phases, { x: "step", unit: "s", height: 240, label: "phases of each step", say, ...options, filled: true }, lines.toReversed());
  }

  const cards = new Map();
  function single(metric, points, options) {
    if (!charts.has(metric.name)) {
      const box = el("div", { class: "plot" });
      const [value, where] = [el("b"), el("span", { class: "muted at", "aria-live": "polite" })];
      grid.append(el("section", { class: "card", dataset: { metric: metric.name } }, el("header", {}, el("h3", { title: metric.meaning }, metric.name), el("span", { class: "unit" }, metric.unit), where), el("p", { class: "meaning" }, metric.meaning), box, el("ul", { class: "legend" }, el("li", {}, value))));
      cards.set(metric.name, { box, value, where });
    }
    const { box, value, where } = cards.get(metric.name);
    const say = (cursor) => {
      setText(where, cursor ? xText("step", cursor.x) : "");
      setText(value, yText(cursor ? cursor.y[0] : points.y.at(-1), metric.unit));
    };
    place(metric.name, box, { x: "step", unit: metric.unit, height: 150, label: metric.name, say, ...options }, [{ ...points, label: metric.name, color: colorOf(0), marks: options.marks }]);
  }

  async function drawLanes(run, state, isNewest) {
    step.max = String(Math.max(steps.length - 1, 0));
    step.hidden = steps.length < 2;
    const wanted = state.step === undefined ? steps.at(-1) : Number(state.step);
    const chosen = steps.includes(wanted) ? wanted : steps.at(-1);
    step.value = String(steps.indexOf(chosen));
    setText(stepText, chosen === undefined ? "" : `step ${number(chosen)}`);
    canvas.hidden = chosen === undefined;
    busy.hidden = listed.hidden = chosen === undefined;
    const why = isFull ? ": its file is full" : "";
    const ended = leftOut ? `This page holds ${leftOut}. ` : run.step > steps.at(-1) + 1 ? `The timeline ends at step ${number(steps.at(-1))}${why}. ` : "";
    setText(told, chosen === undefined ? "This run has no timeline." : ended);
    const key = JSON.stringify([run.id, chosen, run.step === chosen, isDark(), canvas.parentElement.clientWidth]);
    if (chosen === undefined || key === painted) return;
    const found = await context.api.timeline(run.id, chosen, chosen);
    if (!isNewest()) return;
    painted = key;
    paint(found);
    setText(told, ended + (found.more ? "Only the first events are shown." : ""));
    replace(busy, found.lanes.map((lane, k) => lane !== "driver" && el("li", {}, el("span", { class: "label" }, lane), el("b", {}, `waits ${Math.round(100 * (1 - found.busy[k]))}%`))));
    shown = found;
    drawList();
  }

  /** The same for those who cannot see the picture. */
  let shown = null;
  function drawList() {
    if (!listed.open || !shown) return;
    const lines = shown.events.slice(0, 500).map((event) => el("tr", {}, el("td", {}, shown.lanes[event.lane]), el("td", {}, event.name.replaceAll("_", " ")), el("td", {}, duration(event.start)), el("td", {}, duration(event.seconds))));
    const heads = ["who", "what", "from", "for"].map((title) => el("th", { scope: "col" }, title));
    replace(listed.lastChild, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, lines)));
  }

  function paint({ lanes, events: happened }) {
    const order = [...happened].sort((a, b) => a.start - b.start || b.seconds - a.seconds);
    const rows = new Map();
    const places = [];
    lanes.forEach((name, lane) => {
      const ends = [];
      for (const event of order.filter((one) => one.lane === lane)) {
        let row = ends.findIndex((end) => end <= event.start + 1e-6);
        if (row < 0) row = ends.push(0) - 1;
        ends[row] = event.start + event.seconds;
        places.push({ ...event, row });
      }
      rows.set(lane, Math.max(ends.length, 1));
    });
    const width = Math.max(canvas.parentElement.clientWidth, 320);
    const isNarrow = width < 500;
    const [height, left] = [20, isNarrow ? 84 : 130];
    const tops = [];
    let total = 6;
    lanes.forEach((_, lane) => { tops[lane] = total; total += rows.get(lane) * height + 8; });
    const end = Math.max(...places.map((event) => event.start + event.seconds), 1e-6);
    const dense = devicePixelRatio || 1;
    canvas.width = width * dense;
    canvas.height = (total + 18) * dense;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${total + 18}px`;
    const pen = canvas.getContext("2d");
    pen.scale(dense, dense);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const ink = isDark() ? "#a3a29d" : "#6b6963";
    const at_ = (seconds) => left + (seconds / end) * (width - left - 8);
    lanes.forEach((name, lane) => {
      pen.fillStyle = ink;
      pen.fillText(pen.measureText(name).width > left - 8 ? `${name.slice(0, left / 7)}…` : name, 4, tops[lane] + height / 2);
      pen.fillStyle = isDark() ? "#1f2226" : "#f3f2ef";
      pen.fillRect(left, tops[lane], width - left - 8, rows.get(lane) * height);
    });
    const boxes = places.map((event) => {
      const box = { x: at_(event.start), y: tops[event.lane] + event.row * height, w: Math.max(at_(event.start + event.seconds) - at_(event.start), 1), h: height - 3, event };
      pen.fillStyle = event.name === "step" ? (isDark() ? "#3a3e45" : "#d9d8d3") : phaseColor(event.phase);
      pen.fillRect(box.x, box.y, box.w, box.h);
      if (box.w > 40) {
        pen.fillStyle = event.name === "step" ? ink : isDark() ? "#101113" : "#ffffff";
        pen.save();
        pen.beginPath();
        pen.rect(box.x, box.y, box.w - 3, box.h);
        pen.clip();
        pen.fillText(event.name.replaceAll("_", " "), box.x + 4, box.y + box.h / 2);
        pen.restore();
      }
      return box;
    });
    pen.fillStyle = ink;
    const parts = isNarrow ? 2 : 4;
    for (let k = 0; k <= parts; k++) {
      const text = duration((end * k) / parts);
      const shift = k === parts ? pen.measureText(text).width : k ? pen.measureText(text).width / 2 : 0;
      pen.fillText(text, at_((end * k) / parts) - shift, total + 8);
    }
    canvas.onmousemove = (event) => {
      const [x, y] = [event.offsetX, event.offsetY];
      const box = boxes.findLast((one) => x >= one.x && x <= one.x + one.w && y >= one.y && y <= one.y + one.h);
      tip(box ? `${lanes[box.event.lane]}: ${box.event.name.replaceAll("_", " ")}\n${duration(box.event.seconds)}, from ${duration(box.event.start)} on` : "", event.clientX, event.clientY);
    };
    canvas.onmouseleave = () => tip("");
  }

  function drawEvents(run, { events: happened, stalls }) {
    const marks = marksOf({ events: happened, stalls });
    redraw(events, [run.id, marks], () => [whatHeldItUp(run, marks, stalls)].flat(2));
  }

  function whatHeldItUp(run, marks, stalls) {
    if (!marks.length) return [el("p", { class: "muted" }, "No stalls, restarts or resumes.")];
    const reports = stalls.map((stall) => {
      const text = el("pre", {}, "…");
      const open = async (event) => { if (event.target.open) setText(text, (await context.api.stall(run.id, stall.file)).text); };
      return el("details", { ontoggle: open }, el("summary", {}, `step ${number(stall.step)}: ${stall.phase.replaceAll("_", " ")} took far longer than usual; stacks of all processes`), text);
    });
    const rest = marks.filter((mark) => mark.kind !== "stall" && mark.kind !== "alarm").map((mark) => el("p", {}, el("b", {}, `step ${number(mark.x)} `), `${mark.kind}: ${mark.text}`));
    return [reports.length || rest.length ? el("h2", {}, "What held it up") : null, reports, rest];
  }

  const resized = new ResizeObserver(debounced(() => { if (runs.length && `${root.clientWidth}` !== resized.width) { resized.width = `${root.clientWidth}`; update(read()); } }, 200));
  resized.observe(root);
  return {
    update,
    async tick() {
      await (isAlive(runs) ? update(read()) : context.chosen());
    },
    close() { resized.disconnect(); charts.forEach((chart) => chart.close()); tip(""); },
  };
}
