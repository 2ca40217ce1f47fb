// Elements, numbers and durations for people. Text only ever becomes a text node: nothing a model wrote can be markup.

/** An element. `props`: class, dataset, aria-… and other attributes, on<event> listeners, and DOM properties. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name === "class") node.className = value;
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Make the children of a node anew, but only where what they show has changed: focus, selection and open menus survive. */
export function redraw(node, shown, make) {
  const key = JSON.stringify(shown);
  if (node.dataset.key === key) return;
  node.dataset.key = key;
  replace(node, make());
}

/** Set the text only where it changed, so that a selection in it survives. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** 0.0001234 → 1.23e-4, 1234567 → 1,234,567, 12.3456 → 12.35 */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value) || size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

export function inUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  return unit === "share" ? `${(100 * value).toFixed(1)}%` : number(value);
}

export function compact(value) {
  return Math.abs(value) >= 10000 ? value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 }) : number(value);
}

/** 42 → 42 s, 95 → 1 min 35 s, 7500 → 2 h 05 min */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  const total = Math.round(seconds);
  if (total < 60) return `${total} s`;
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${String(rest).padStart(2, "0")} s`;
}

export function ago(then, now) {
  const seconds = Math.max(now - then, 0);
  return seconds < 5 ? "now" : `${duration(Math.round(seconds)).replace(/ \d+ s$/, seconds >= 60 ? "" : "$&")} ago`;
}

export function clock(time) {
  return time ? new Date(time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" }) : "";
}

export function debounced(function_, wait = 200) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => function_(...given), wait);
  };
}

/** Tells answers that came too late: `const isNewest = asked()` before a question, `if (!isNewest()) return` after it. */
export function newest() {
  let count = 0;
  return () => {
    const own = ++count;
    return () => own === count;
  };
}

/** Whether one of the runs goes on; of the others, nothing new is to be asked but whether they are still there. */
export const isAlive = (runs) => runs.some((run) => ["running", "stalled"].includes(run.state));

/** The tooltip beside a point of the window; without text it goes away. */
export function tip(text, x = 0, y = 0) {
  const node = document.getElementById("tip");
  node.hidden = !text;
  if (!text) return;
  setText(node, text);
  const box = node.getBoundingClientRect();
  node.style.left = `${Math.max(Math.min(x + 12, innerWidth - box.width - 8), 8)}px`;
  node.style.top = `${y + 18 + box.height > innerHeight ? Math.max(y - box.height - 10, 8) : y + 18}px`;
}

export function spark(values, width = 96, height = 22) {
  if (values.length < 2) return svg("svg", { width, height, "aria-hidden": "true" });
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, k) => {
    const x = 1 + (k / (values.length - 1)) * (width - 2);
    const y = high === low ? height / 2 : 2 + ((high - value) / (high - low)) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  return svg("svg", { width, height, class: "spark", "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }));
}

/** A choice between the chosen runs, for views that show one; nothing where there is but one. */
export function drawPicker(node, runs, picked, pick) {
  redraw(node, [picked?.id, runs.map((run) => [run.id, run.name])], () => {
    if (runs.length < 2) return [];
    const options = runs.map((run) => el("option", { value: run.id, selected: run.id === picked.id }, run.name));
    return [el("select", { "aria-label": "run", onchange: (event) => pick(event.target.value) }, options)];
  });
}

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

const LIGHT = ["#2f5fd0", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#c2255c", "#846358", "#e67700", "#5f3dc4", "#495057"];
const DARK = ["#7aa2ff", "#ff9466", "#69db7c", "#da77f2", "#3bc9db", "#f783ac", "#d0b8a8", "#ffc078", "#a48bff", "#adb5bd"];
export const palette = () => (isDark() ? DARK : LIGHT);
export const colorOf = (place) => palette()[place % LIGHT.length];

/** `#rrggbb` with an opacity. */
export const faded = (color, opacity) => color + Math.round(opacity * 255).toString(16).padStart(2, "0");
