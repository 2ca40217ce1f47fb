// The table of runs: find, sort, tag, and choose those to look at.

import { ago, debounced, duration, el, newest, number, redraw, replace, setText, spark } from "dash/dom.js";
import { allTags, change, read, setTags, tagsOf } from "dash/state.js";

const STATES = ["running", "stalled", "finished", "interrupted", "failed"];
const COLUMNS = [
  ["", null], ["run", "name"], ["state", "state"], ["step", "step"], ["left", "eta"], ["course", "main"],
  ["held-out", "validation"], ["set keys", null], ["updated", "updated"],
];
const WIDTH = COLUMNS.length;
const MOST_KEYS = 4;
const PAGE = 100;

export function mount(root, context) {
  let shown = PAGE;
  const asked = newest();
  const rows = new Map();
  const search = el("input", { type: "search", placeholder: "name, key=value, state, #tag", "aria-label": "find runs" });
  const states = el("div", { class: "segments", role: "group", "aria-label": "state" });
  const compare = el("button", { class: "primary", onclick: () => change({ view: "curves" }) });
  const clear = el("button", { class: "plain", onclick: () => change({ runs: [] }, true) }, "choose none");
  const count = el("span", { class: "muted" });
  const heads = COLUMNS.map(([title, sort]) => head(title, sort));
  const headRow = el("tr", {}, heads);
  const wish = el("input", { type: "search", list: "metrics", placeholder: "+ column", class: "small", "aria-label": "add a column: the newest value of a metric" });
  const known = el("datalist", { id: "metrics" });
  wish.addEventListener("focus", offer);
  wish.addEventListener("change", () => {
    if (wish.value.trim()) change({ cols: [...new Set([...columns(), wish.value.trim()])].join(" ") }, true);
    wish.value = "";
  });
  const body = el("tbody");
  const more = el("button", { class: "plain", hidden: true, onclick: () => { shown += PAGE; tick(); } }, "show more");
  const empty = el("div", { class: "empty", hidden: true });
  const table = el("table", { class: "runs" }, el("thead", {}, headRow), body);
  search.addEventListener("input", debounced(() => change({ text: search.value || null }, true)));
  replace(root, el("div", { class: "tools" }, search, states, count, el("span", { class: "grow" }), wish, known, clear, compare), el("div", { class: "scroll" }, table), empty, more);

  function head(title, sort) {
    if (!sort) return el("th", { scope: "col" }, title);
    const flip = () => {
      const { sort: now = "updated", order = "down" } = read();
      change({ sort, order: now === sort && order === "down" ? "up" : "down" }, true);
    };
    return el("th", { scope: "col", dataset: { sort } }, el("button", { class: "plain", onclick: flip }, title));
  }

  /** Metrics that were chosen as columns of their own, after those that every table has. */
  const columns = () => (read().cols ?? "").split(" ").filter(Boolean);

  function drawColumns(sort, order) {
    const own = columns();
    redraw(headRow, [own, sort, order], () => {
      const more_ = own.map((name) => {
        const node = head(name, `metric ${name}`);
        node.append(el("button", { class: "plain", "aria-label": `remove column ${name}`, onclick: () => change({ cols: own.filter((other) => other !== name).join(" ") || null }, true) }, "×"));
        return node;
      });
      const all = [...heads, ...more_];
      all.forEach((node) => node.dataset.sort && node.setAttribute("aria-sort", node.dataset.sort === sort ? (order === "down" ? "descending" : "ascending") : "none"));
      return all;
    });
    return own;
  }

  /** The metrics of the runs on top of the table, to choose columns from. */
  async function offer() {
    const found = await Promise.all([...rows.keys()].slice(0, 3).map((id) => context.api.metrics(id).catch(() => [])));
    replace(known, [...new Set(found.flat().map((metric) => metric.name))].map((name) => el("option", { value: name })));
  }

  async function tick() {
    const isNewest = asked();
    const { text = "", state = "", sort = "updated", order = "down", runs: chosen } = read();
    if (document.activeElement !== search) search.value = text;
    const words = text.split(/\s+/).filter(Boolean);
    const tags = words.filter((word) => word.startsWith("#")).map((word) => word.slice(1));
    const tagged = Object.entries(allTags()).filter(([, own]) => tags.every((tag) => own.includes(tag))).map(([id]) => id);
    const plain = words.filter((word) => !word.startsWith("#")).join(" ");
    const ids = tags.length ? tagged.join(",") || "none" : "";
    const found = await context.api.runs({ text: plain, state, sort, order, limit: shown, ids, column: columns() });
    if (!isNewest()) return;
    const own = drawColumns(sort, order);
    drawStates(found.counts, found.all, state);
    const kept = new Set(found.rows.map((row) => row.id));
    const telling = keysThatDiffer(found.rows);
    for (const [id, line] of rows) if (!kept.has(id)) { line.node.remove(); rows.delete(id); }
    found.rows.forEach((row, place) => {
      if (!rows.has(row.id)) rows.set(row.id, makeRow(row));
      const line = rows.get(row.id);
      line.update(row, found.now, chosen.includes(row.id), found.roots.length > 1, own, telling);
      if (body.children[place] !== line.node) body.insertBefore(line.node, body.children[place] ?? null);
    });
    more.hidden = found.total <= shown;
    setText(more, `show more (${number(found.total - shown)} are not shown)`);
    setText(count, [found.total === found.all ? "" : `${number(found.total)} of ${number(found.all)}`, found.left_out ?? ""].filter(Boolean).join(" · "));
    compare.hidden = clear.hidden = !chosen.length;
    setText(compare, chosen.length > 1 ? `compare ${chosen.length} runs` : "look at this run");
    empty.hidden = found.total > 0;
    table.hidden = found.total === 0;
    if (!found.total) {
      replace(empty, found.all ? "No run is like that." : el("div", {}, el("p", {}, `There are no runs in ${found.roots.join(", ")} yet.`), el("p", { class: "muted" }, "`quadriga train` makes one; it appears here at its first step.")));
    }
    if (found.problems.length) throw new Error(found.problems.slice(0, 3).join(" · "));
  }

  function drawStates(counts, all, state) {
    const button = (name, label, many) => el("button", { "aria-pressed": String(state === name), onclick: () => change({ state: name || null }, true) }, label, el("span", { class: "muted" }, ` ${number(many)}`));
    redraw(states, [counts, all, state], () => [button("", "all", all), ...STATES.filter((name) => counts[name]).map((name) => button(name, name, counts[name]))]);
  }

  return { update: tick, tick };
}

function makeRow(first) {
  const box = el("input", { type: "checkbox", "aria-label": `choose ${first.name}` });
  box.addEventListener("change", () => {
    const others = read().runs.filter((id) => id !== first.id);
    change({ runs: box.checked ? [...others, first.id] : others }, true);
  });
  const open = (event) => {
    event.preventDefault();
    change({ view: "curves", runs: [first.id] });
  };
  const name = el("a", { href: `#curves?runs=${first.id}`, class: "name", onclick: open }, first.name);
  const [kind, root] = [el("span", { class: "kind" }), el("span", { class: "root muted" })];
  const tags = el("span", { class: "tags" });
  const [state, detail] = [el("span"), el("div", { class: "detail" })];
  const [step, bar] = [el("span"), el("progress", { max: 1, value: 0 })];
  const [left, value, course, held, keys, updated] = [el("td"), el("b"), el("span"), el("td", { class: "held" }), el("td", { class: "keys" }), el("td", { class: "muted" })];
  const cell = (label, ...children) => el("td", { dataset: { label } }, ...children);
  [[left, "left"], [held, "held-out"], [keys, "set keys"], [updated, "updated"]].forEach(([node, label]) => { node.dataset.label = label; });
  const node = el("tr", { dataset: { run: first.id } }, el("td", { class: "pick" }, box), cell("run", root, name, kind, tags), cell("state", state, detail),
    cell("step", step, bar), left, cell("course", el("span", { class: "course" }, course, value)), held, keys, updated);
  let before = "";

  function update(row, now, isChosen, severalRoots, columns, telling) {
    setText(root, severalRoots ? `${row.root}/` : "");
    name.title = row.folder;
    redraw(node, [columns, row.columns], () => [...[...node.children].slice(0, WIDTH), ...columns.map((title, k) => el("td", { class: "own", title, dataset: { label: title } }, row.columns?.[k] ?? "–"))]);
    box.checked = isChosen;
    setText(updated, ago(row.updated, now));
    updated.title = new Date(row.updated * 1000).toLocaleString();
    setText(left, row.eta_s === null ? "" : duration(row.eta_s));
    const doing = row.phase ? `${row.phase.replaceAll("_", " ")} ${duration(row.phase_s)}` : "";
    setText(detail, row.error ? row.error.split("\n")[0] : row.state === "running" || row.state === "stalled" ? doing : "");
    detail.title = row.error;
    const changed = Object.entries(row.changed).sort(([one], [other]) => telling.has(other) - telling.has(one));
    const key = JSON.stringify([row.state, row.step, row.total, row.main, row.spark, row.validations, changed, row.alarms, tagsOf(row.id)]);
    if (key === before) return;
    before = key;
    node.className = row.state;
    setText(kind, row.kind);
    state.className = `state ${row.state}`;
    setText(state, row.state);
    setText(step, row.total ? `${number(row.step)} / ${number(row.total)}` : number(row.step));
    bar.hidden = !row.total;
    bar.value = row.total ? Math.min(row.step / row.total, 1) : 0;
    setText(value, row.main ? row.main.text : "");
    value.title = row.main ? row.main.name : "";
    replace(course, spark(row.spark, 80));
    replace(held, Object.entries(row.validations).slice(0, 2).map(([source, seen]) => el("div", { title: source }, heldOut(seen, row.intervals[source]))));
    const alarm = Object.entries(row.alarms).map(([what, text]) => el("span", { class: "alarm", title: text }, `⚠ ${what.replaceAll("_", " ")}`));
    const set = changed.map(([key, one]) => el("span", { class: "key", title: `${key}=${text(one)}` }, `${key.split(".").at(-1)}=${text(one)}`));
    replace(keys, alarm, set.slice(0, MOST_KEYS), set.length > MOST_KEYS ? el("span", { class: "muted", title: changed.slice(MOST_KEYS).map(([key, one]) => `${key}=${text(one)}`).join("\n") }, `+${set.length - MOST_KEYS}`) : null);
    drawTags(row.id);
  }

  function drawTags(id) {
    const remove = (tag) => { setTags(id, tagsOf(id).filter((other) => other !== tag)); drawTags(id); };
    const add = el("button", { class: "plain add", title: "add a tag", "aria-label": `tag ${first.name}`, onclick: () => ask(id) }, "+ tag");
    const copy = el("button", { class: "plain add", title: "copy the folder's path", "aria-label": `copy the path of ${first.name}`, onclick: () => copyText(first.folder, copy) }, "copy path");
    replace(tags, tagsOf(id).map((tag) => el("span", { class: "tag" }, `#${tag}`, el("button", { class: "plain", "aria-label": `remove tag ${tag}`, onclick: () => remove(tag) }, "×"))), add, copy);
  }

  function ask(id) {
    const field = el("input", { class: "small", placeholder: "tag", "aria-label": "new tag" });
    const done = (keep) => {
      const tag = field.value.trim().replace(/[#\s]+/g, "-");
      if (keep && tag) setTags(id, [...new Set([...tagsOf(id), tag])]);
      drawTags(id);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") done(true);
      if (event.key === "Escape") done(false);
    });
    field.addEventListener("blur", () => done(true));
    replace(tags, field);
    field.focus();
  }

  return { node, update };
}

/** The keys that were set in some of these runs and not, or otherwise, in others of their kind: those are shown first. */
function keysThatDiffer(rows) {
  const found = new Set();
  const firsts = new Map();
  for (const row of rows) {
    const first = firsts.get(row.kind) ?? firsts.set(row.kind, row.changed).get(row.kind);
    for (const key of [...Object.keys(first), ...Object.keys(row.changed)]) if (JSON.stringify(first[key]) !== JSON.stringify(row.changed[key])) found.add(key);
  }
  return found;
}

/** Where the browser gives no clipboard (a page that is not on this machine), the path is shown to be copied by hand. */
async function copyText(text_, button) {
  try {
    await navigator.clipboard.writeText(text_);
    setText(button, "copied");
  } catch {
    setText(button, text_);
  }
}

/** Before and after, or one value with its 95 % interval where there is one. */
function heldOut(seen, interval) {
  if (interval) return `${percent(seen.last)} (${interval.map((value) => (100 * value).toFixed(1)).join("–")})`;
  return seen.first_step === seen.last_step ? percent(seen.last) : `${percent(seen.first)} → ${percent(seen.last)}`;
}

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);
const text = (value) => {
  const whole = typeof value === "string" ? value : JSON.stringify(value);
  return whole.length > 28 ? `${whole.slice(0, 27)}…` : whole;
};
