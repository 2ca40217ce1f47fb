// What was set, what it means, and what differs between the chosen runs.

import { debounced, el, newest, replace } from "dash/dom.js";
import { change } from "dash/state.js";

const SHOWN = [["set", "what was set"], ["differs", "what differs between the runs"], ["all", "all keys"]];

export function mount(root, context) {
  const search = el("input", { type: "search", placeholder: "find keys", "aria-label": "find keys" });
  const which = el("div", { class: "segments", role: "group", "aria-label": "which keys" });
  const body = el("div", { class: "scroll" });
  search.addEventListener("input", debounced(() => change({ q: search.value || null }, true)));
  replace(root, el("div", { class: "tools" }, which, search), body);

  const asked = newest();

  async function update(state) {
    const isNewest = asked();
    const runs = await context.chosen();
    const { keys, problems } = runs.length ? await context.api.config(runs.map((run) => run.id)) : { keys: [], problems: [] };
    if (!isNewest()) return;
    document.activeElement !== search && (search.value = state.q ?? "");
    if (!runs.length) {
      replace(which);
      replace(body, el("div", { class: "empty" }, "Choose one or more runs to see their configuration."));
      return;
    }
    const mode = state.show ?? (runs.length > 1 ? "differs" : "set");
    replace(which, SHOWN.filter(([name]) => name !== "differs" || runs.length > 1).map(([name, label]) =>
      el("button", { "aria-pressed": String(mode === name), onclick: () => change({ show: name }, true) }, label)));
    const words = (state.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const fits = keys.filter((key) => (mode === "all" || (mode === "differs" ? key.differs : key.set.some(Boolean))) && words.every((word) => `${key.key} ${key.meaning}`.toLowerCase().includes(word)));
    const heads = runs.map((run) => {
      const dot = el("span", { class: "dot" });
      dot.style.background = run.color;
      return el("th", { scope: "col" }, dot, run.name);
    });
    const lines = fits.map((key) => el("tr", {},
      el("th", { scope: "row", title: key.meaning }, breakable(key.key), el("div", { class: "meaning" }, [key.meaning, key.unit && `(${key.unit})`].filter(Boolean).join(" "))),
      key.values.map((value, k) => el("td", { class: key.set[k] ? "set" : "" }, shown(value))),
      el("td", { class: "muted" }, shown(key.default))));
    const none = problems.length && !keys.length ? "" : mode === "differs" ? "These runs have the same configuration." : "Nothing is like that.";
    replace(body, problems.length ? el("p", { class: "muted" }, problems.join(" · ")) : null,
      lines.length ? el("table", { class: "config" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"), heads, el("th", { scope: "col" }, "default"))), el("tbody", {}, lines)) : el("div", { class: "empty" }, none));
  }
  return { update };
}

/** A key that a narrow column may break after its dots and underscores. */
const breakable = (key) => key.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]);

const shown = (value) => (value === null || value === undefined ? "null" : typeof value === "string" ? value : JSON.stringify(value));
