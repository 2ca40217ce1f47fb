// The table of runs: find, sort, tag, and choose those to look at.

import { ago, duration, el, number, replace, setText, spark, debounced } from "dash/dom.js";
import { allTags, change, read, setTags, tagsOf } from "dash/state.js";

const STATES = ["running", "stalled", "finished", "interrupted", "failed"];
const COLUMNS = [
  ["", null], ["run", "name"], ["state", "state"], ["step", "step"], ["left", "eta"], ["course", "main"],
  ["held-out", "validation"], ["set keys", null], ["updated", "updated"],
];
const PAGE = 100;

export function mount(root, context) {
  let shown = PAGE;
  const rows = new Map();
  const search = el("input", { type: "search", placeholder: "name, key=value, state, #tag", "aria-label": "find runs" });
  const states = el("div", { class: "segments", role: "group", "aria-label": "state" });
  const compare = el("button", { class: "primary", onclick: () => change({ view: "curves" }) });
  const clear = el("button", { class: "plain", onclick: () => change({ runs: [] }, true) }, "choose none");
  const count = el("span", { class: "muted" });
  const heads = COLUMNS.map(([title, sort]) => head(title, sort));
  const body = el("tbody");
  const more = el("button", { class: "plain", hidden: true, onclick: () => { shown += PAGE; tick(); } }, "show more");
  const empty = el("div", { class: "empty", hidden: true });
  const table = el("table", { class: "runs" }, el("thead", {}, el("tr", {}, heads)), body);
  search.addEventListener("input", debounced(() => change({ text: search.value || null }, true)));
  replace(root, el("div", { class: "tools" }, search, states, count, el("span", { class: "grow" }), clear, compare), el("div", { class: "scroll" }, table), empty, more);

  function head(title, sort) {
    if (!sort) return el("th", { scope: "col" }, title);
    const flip = () => {
      const { sort: now = "updated", order = "down" } = read();
      change({ sort, order: now === sort && order === "down" ? "up" : "down" }, true);
    };
    return el("th", { scope: "col", dataset: { sort } }, el("button", { class: "plain", onclick: flip }, title));
  }

  async function tick() {
    const { text = "", state = "", sort = "updated", order = "down", runs: chosen } = read();
    if (document.activeElement !== search) search.value = text;
    const words = text.split(/\s+/).filter(Boolean);
    const tags = words.filter((word) => word.startsWith("#")).map((word) => word.slice(1));
    const tagged = Object.entries(allTags()).filter(([, own]) => tags.every((tag) => own.includes(tag))).map(([id]) => id);
    const plain = words.filter((word) => !word.startsWith("#")).join(" ");
    const ids = tags.length ? tagged.join(",") || "none" : "";
    const found = await context.api.runs({ text: plain, state, sort, order, limit: shown, ids });
    drawStates(found.counts, found.all, state);
    const kept = new Set(found.rows.map((row) => row.id));
    for (const [id, line] of rows) if (!kept.has(id)) { line.node.remove(); rows.delete(id); }
    found.rows.forEach((row, place) => {
      if (!rows.has(row.id)) rows.set(row.id, makeRow(row));
      const line = rows.get(row.id);
      line.update(row, found.now, chosen.includes(row.id));
      if (body.children[place] !== line.node) body.insertBefore(line.node, body.children[place] ?? null);
    });
    heads.forEach((node) => node.dataset.sort && node.setAttribute("aria-sort", node.dataset.sort === sort ? (order === "down" ? "descending" : "ascending") : "none"));
    more.hidden = found.total <= shown;
    setText(more, `show more (${number(found.total - shown)} are not shown)`);
    setText(count, found.total === found.all ? "" : `${number(found.total)} of ${number(found.all)}`);
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
    const key = JSON.stringify([counts, all, state]);
    if (states.dataset.key === key) return;
    states.dataset.key = key;
    replace(states, button("", "all", all), STATES.filter((name) => counts[name]).map((name) => button(name, name, counts[name])));
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
  const kind = el("span", { class: "kind" });
  const tags = el("span", { class: "tags" });
  const [state, detail] = [el("span"), el("div", { class: "detail" })];
  const [step, bar] = [el("span"), el("progress", { max: 1, value: 0 })];
  const [left, value, course, held, keys, updated] = [el("td"), el("b"), el("span"), el("td", { class: "held" }), el("td", { class: "keys" }), el("td", { class: "muted" })];
  const cell = (label, ...children) => el("td", { dataset: { label } }, ...children);
  [[left, "left"], [held, "held-out"], [keys, "set keys"], [updated, "updated"]].forEach(([node, label]) => { node.dataset.label = label; });
  const node = el("tr", { dataset: { run: first.id } }, el("td", { class: "pick" }, box), cell("run", name, kind, tags), cell("state", state, detail),
    cell("step", step, bar), left, cell("course", el("span", { class: "course" }, course, value)), held, keys, updated);
  let before = "";

  function update(row, now, isChosen) {
    box.checked = isChosen;
    setText(updated, ago(row.updated, now));
    updated.title = new Date(row.updated * 1000).toLocaleString();
    setText(left, row.eta_s === null ? "" : duration(row.eta_s));
    const doing = row.phase ? `${row.phase.replaceAll("_", " ")} ${duration(row.phase_s)}` : "";
    setText(detail, row.error ? row.error.split("\n")[0] : row.state === "running" || row.state === "stalled" ? doing : "");
    detail.title = row.error;
    const key = JSON.stringify([row.state, row.step, row.total, row.main, row.spark, row.validations, row.changed, row.alarms, tagsOf(row.id)]);
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
    replace(course, spark(row.spark));
    replace(held, Object.entries(row.validations).slice(0, 2).map(([source, seen]) => el("div", { title: source }, seen.first_step === seen.last_step ? percent(seen.last) : `${percent(seen.first)} → ${percent(seen.last)}`)));
    const alarm = Object.entries(row.alarms).map(([what, text]) => el("span", { class: "alarm", title: text }, `⚠ ${what.replaceAll("_", " ")}`));
    const set = Object.entries(row.changed).map(([key, one]) => el("span", { class: "key", title: `${key}=${text(one)}` }, `${key.split(".").at(-1)}=${text(one)}`));
    replace(keys, alarm, set.slice(0, 5), set.length > 5 ? el("span", { class: "muted" }, `+${set.length - 5}`) : null);
    drawTags(row.id);
  }

  function drawTags(id) {
    const remove = (tag) => { setTags(id, tagsOf(id).filter((other) => other !== tag)); drawTags(id); };
    const add = el("button", { class: "plain add", title: "add a tag", "aria-label": `tag ${first.name}`, onclick: () => ask(id) }, "+ tag");
    replace(tags, tagsOf(id).map((tag) => el("span", { class: "tag" }, `#${tag}`, el("button", { class: "plain", "aria-label": `remove tag ${tag}`, onclick: () => remove(tag) }, "×"))), add);
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

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);
const text = (value) => {
  const whole = typeof value === "string" ? value : JSON.stringify(value);
  return whole.length > 28 ? `${whole.slice(0, 27)}…` : whole;
};
