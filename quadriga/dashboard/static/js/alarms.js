// What looked wrong, what was said, told and done, in the order in which it happened.

import { clock, el, newest, number, replace } from "dash/dom.js";
import { change } from "dash/state.js";

const SHOWN = [["important", "alarms and warnings"], ["all", "everything"]];

export function mount(root, context) {
  const which = el("div", { class: "segments", role: "group", "aria-label": "which events" });
  const now = el("div", { class: "standing" });
  const list = el("div");
  replace(root, el("div", { class: "tools" }, which), now, list);
  let key = "";

  const asked = newest();

  async function update(state) {
    const isNewest = asked();
    let runs = await context.chosen();
    if (!runs.length) runs = (await context.api.runs({ sort: "updated", limit: 20 })).rows.filter((row) => Object.keys(row.alarms).length || row.state === "failed" || row.state === "stalled");
    const mode = state.show === "all" ? "all" : "important";
    const found = await Promise.all(runs.map((run) => context.api.events(run.id).catch(() => ({ events: [], stalls: [] }))));
    if (!isNewest()) return;
    const wanted = JSON.stringify([mode, runs.map((run) => [run.id, run.state, run.alarms]), found.map((one) => one.events.length)]);
    if (wanted === key) return;
    key = wanted;
    replace(which, SHOWN.map(([name, label]) => el("button", { "aria-pressed": String(mode === name), onclick: () => change({ show: name === "all" ? name : null }, true) }, label)));
    const standing = runs.flatMap((run) => Object.entries(run.alarms).map(([name, text]) => el("div", { class: "alarmbox" }, el("b", {}, `⚠ ${name.replaceAll("_", " ")}`), el("span", { class: "muted" }, ` ${run.name}, still so at step ${number(run.step)}`), el("p", {}, text), links(run, run.step))));
    const errors = runs.filter((run) => run.error).map((run) => el("div", { class: "alarmbox failed" }, el("b", {}, `${run.name} ${run.state}`), el("pre", {}, run.error), links(run, run.step)));
    replace(now, standing, errors);
    const events = found.flatMap((one, k) => one.events.map((event) => ({ ...event, run: runs[k] })));
    const fits = events.filter((event) => mode === "all" || ["alarm", "steered", "restart"].includes(event.kind) || event.level === "warning" || (event.kind === "start" && event.text !== "started") || (event.kind === "end" && event.text !== "finished"));
    fits.sort((a, b) => (b.time ?? 0) - (a.time ?? 0));
    const lines = fits.slice(0, 500).map((event) => {
      const label = el("b", { class: event.kind === "alarm" ? "raised" : "" }, event.kind === "alarm" ? event.name.replaceAll("_", " ") : event.level === "warning" ? "warning" : event.kind);
      return el("li", {}, el("span", { class: "when" }, clock(event.time)), el("span", { class: "where" }, `${runs.length > 1 ? `${event.run.name} · ` : ""}step ${number(event.step ?? 0)}`),
        el("div", {}, label, " ", el("span", { class: "said" }, event.kind === "end" ? event.text.split("\n")[0] : event.text), event.look ? el("p", { class: "muted" }, event.look) : null, ["alarm", "restart"].includes(event.kind) ? links(event.run, event.step) : null));
    });
    replace(list, lines.length ? el("ol", { class: "events" }, lines) : el("div", { class: "empty" }, standing.length || errors.length ? "" : runs.length ? "All quiet: no alarm, no warning." : "No run looks wrong."));
  }
  return { update, tick: update };
}

/** Where to look: the samples of that step, the curves around it, what the workers did and printed. */
function links(run, step) {
  const to = (view, more) => el("a", { href: `#${view}?${new URLSearchParams({ runs: run.id, ...more })}` }, view);
  const around = { from: Math.max(step - 50, 0), to: step + 20 };
  return el("p", { class: "links" }, to("samples", { kind: "train", step }), to("curves", around), to("time", { ...around, step }), to("logs", {}));
}
