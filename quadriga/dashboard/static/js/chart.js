// One chart: several runs over one x axis, drawn by uPlot; zoom by dragging, values under the cursor, marks of events.

import uPlot from "uplot";
import { compact, duration, faded, inUnit, isDark, number } from "dash/dom.js";

const X_NAMES = { step: "step", tokens: "tokens", time: "time since the start" };
const WHOLE = [1, 2, 5].flatMap((k) => Array.from({ length: 13 }, (_, power) => k * 10 ** power)).sort((a, b) => a - b);
const SECONDS = [0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000, 2592000];
const ink = () => (isDark() ? { text: "#a3a29d", grid: "#26292e" } : { text: "#6b6963", grid: "#ecebe7" });

/** An exponential mean. A point that stands for `n` steps weighs and forgets as much as those steps would. */
export function smoothed(points, weight) {
  if (!weight) return points.y;
  let [sum, norm] = [0, 0];
  return points.y.map((value, k) => {
    const n = points.n?.[k] ?? 1;
    const decay = weight ** n;
    sum = sum * decay + value * (1 - decay);
    norm = norm * decay + (1 - decay);
    return sum / norm;
  });
}

/**
 * @param box where to draw.
 * @param options x: name of the axis; from, to: its range; unit; log; smooth; filled: bars from 0; height; label: what it shows; onZoom(from, to);
 *   onCursor(index or null).
 * @param lines [{label, color, x, y, lo, hi, n, smooth, marks: [{x, color}]}]
 * @returns plot, close(), and set(lines): other values of the same lines, without losing the cursor; false where it takes a new chart.
 */
export function draw(box, options, lines) {
  let marks = marksOf(lines);
  const { series, bands, shown } = layers(lines, options);
  const { text, grid } = ink();
  const font = "11px system-ui, sans-serif";
  const xValue = options.x === "time" ? (value) => duration(value) : (value) => compact(value);
  const axis = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
  const range = (low, high) => (options.filled ? [0, (high || 1) * 1.06] : room(low, high, options.unit));
  const plot = new uPlot({
    width: Math.max(box.clientWidth, 120),
    height: options.height ?? 200,
    series,
    bands,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: `x ${options.x}` }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false },
    scales: { x: { time: false, range: (u, low, high) => span(low, high, options.from, options.to, options.filled && lines[0]?.x) }, y: { distr: options.log ? 3 : 1, range: options.log ? undefined : (u, low, high) => range(low, high) } },
    axes: [
      { ...axis, size: 34, incrs: options.x === "time" ? SECONDS : WHOLE, values: (u, splits) => splits.map((value) => (value === null ? "" : xValue(value))) },
      { ...axis, size: 56, values: (u, splits) => splits.map((value) => (value === null ? "" : options.unit === "share" ? `${Math.round(value * 1000) / 10}%` : compact(value))) },
    ],
    hooks: {
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        options.onZoom?.(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      setCursor: [(u) => options.onCursor?.(u.cursor.idx === null || u.cursor.left < 0 ? null : values(u))],
      draw: [(u) => {
        Object.assign(box.dataset, { low: u.scales.y.min, high: u.scales.y.max });
        drawMarks(u, marks);
      }],
    },
  }, columns(lines, options), box);
  plot.over.addEventListener("dblclick", () => options.onZoom?.(null, null));
  Object.assign(plot.root, { tabIndex: 0, onkeydown: (event) => walk(plot, event), onblur: () => plot.setCursor({ left: -10, top: -10 }) });
  plot.root.setAttribute("role", "group");
  plot.root.setAttribute("aria-label", `${options.label ?? "chart"}; arrow keys show values`);
  const shape = shapeOf(lines, options);

  /** x, and the value of each line at the cursor or at its last point before it. */
  function values(u) {
    const at = u.cursor.idx;
    return { x: u.data[0][at], y: shown.map((place) => nearest(u.data[place], at)) };
  }

  function set(others) {
    if (shapeOf(others, options) !== shape) return false;
    marks = marksOf(others);
    plot.setData(columns(others, options));
    return true;
  }
  return { plot, set, close: () => plot.destroy() };
}

const marksOf = (lines) => lines.flatMap((line) => line.marks ?? []);
const isFew = (line, options) => line.x.length <= 30 && !options.filled;
const shapeOf = (lines, options) => JSON.stringify(lines.map((line) => [line.label, line.color, Boolean(line.lo), isFew(line, options), line.x.length === 1]));

/** How the lines are drawn: uPlot's series, the bands between some of them, and which series are the lines themselves. */
function layers(lines, options) {
  const [series, bands, shown] = [[{}], [], []];
  const add = (line, style) => series.push({ label: line.label, spanGaps: true, points: { show: false }, ...style }) - 1;
  for (const line of lines) {
    const color = line.color;
    if (line.lo && !options.smooth) {
      const high = add(line, { stroke: "transparent", width: 0 });
      const low = add(line, { stroke: "transparent", width: 0 });
      bands.push({ series: [high, low], fill: faded(color, 0.16) });
    } else if (options.smooth) add(line, { stroke: faded(color, 0.25), width: 1 });
    const bars = options.filled && { width: 0, fill: color, paths: uPlot.paths.bars({ size: [1, Infinity] }) };
    shown.push(add(line, { stroke: color, width: 1.7, ...bars, points: { show: isFew(line, options), size: line.x.length === 1 ? 7 : 4, fill: color, width: 0 } }));
  }
  return { series, bands, shown };
}

/** The values of those series, over one x. */
function columns(lines, options) {
  const positive = (values) => (options.log ? values.map((value) => (value > 0 ? value : null)) : values);
  const tables = lines.map((line) => {
    const before = line.lo && !options.smooth ? [line.hi, line.lo] : options.smooth ? [line.y] : [];
    return [line.x, ...before.map(positive), positive(smoothed(line, options.smooth))];
  });
  return tables.length ? uPlot.join(tables) : [[]];
}

/** The cursor by keys: a point on or back, with shift ten, to either end; Escape takes it away. */
function walk(plot, event) {
  const x = plot.data[0];
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") plot.setCursor({ left: -10, top: -10 });
  if (!x.length || !(by || event.key === "Home" || event.key === "End")) return;
  event.preventDefault();
  event.stopPropagation();
  const { min, max } = plot.scales.x;
  const inside = x.map((_, k) => k).filter((k) => x[k] >= min && x[k] <= max);
  const now = plot.cursor.left >= 0 && plot.cursor.idx !== null ? inside.indexOf(plot.cursor.idx) : by > 0 ? -1 : inside.length;
  const next = event.key === "Home" ? 0 : event.key === "End" ? inside.length - 1 : now + by * (event.shiftKey ? 10 : 1);
  const at = inside[Math.min(Math.max(next, 0), inside.length - 1)];
  plot.setCursor({ left: plot.valToPos(x[at], "x"), top: 1 });
}

function nearest(values, at) {
  for (let k = at; k >= 0 && k > at - 50; k--) if (values[k] !== null && values[k] !== undefined) return values[k];
  return null;
}

/** Of bars at `x`, the first and the last are seen as a whole. */
function span(low, high, from, to, x) {
  const [a, b] = [from ?? low ?? 0, to ?? high ?? 1];
  const room_ = x?.length > 1 ? (x.at(-1) - x[0]) / (x.length - 1) / 2 : 0;
  return a === b ? [a - 1, b + 1] : [a - room_, b + room_];
}

/** A share from 0 or to 1 where that is near, else what the values need and a little air. */
function room(low, high, unit) {
  if (low === null || high === null) return [0, 1];
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  let [bottom, top] = [low - air, high + air];
  if (unit === "share" && low >= 0 && high <= 1) [bottom, top] = [low < 0.35 ? -0.01 : Math.max(bottom, -0.01), high > 0.65 ? 1.01 : Math.min(top, 1.01)];
  else if (low >= 0 && low < high / 3) bottom = 0;
  return [bottom, top];
}

function drawMarks(u, marks) {
  const pen = u.ctx;
  pen.save();
  for (const mark of marks) {
    const x = Math.round(u.valToPos(mark.x, "x", true));
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    pen.strokeStyle = mark.color;
    pen.fillStyle = mark.color;
    pen.globalAlpha = 0.4;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(x, u.bbox.top);
    pen.lineTo(x, u.bbox.top + u.bbox.height);
    pen.stroke();
    pen.globalAlpha = 1;
    pen.beginPath();
    pen.moveTo(x - 4, u.bbox.top);
    pen.lineTo(x + 4, u.bbox.top);
    pen.lineTo(x, u.bbox.top + 6);
    pen.fill();
  }
  pen.restore();
}

export const xText = (x, value) => (x === "time" ? duration(value) : `${X_NAMES[x]} ${number(value)}`);
export const yText = inUnit;
