// What the workers of a run printed: one file at a time, from its end backwards, and on as it grows.

import { ago, drawPicker, el, isAlive, newest, number, redraw, replace, setText } from "dash/dom.js";
import { change, pickedOf, read } from "dash/state.js";

const FAR = 1 << 20; // bytes: a file that has grown by more is shown from its new end

export function mount(root, context) {
  let [runs, run, files, key, start, end] = [[], null, [], "", 0, 0];
  const [asked, loading] = [newest(), newest()];
  const which = el("span");
  const names = el("select", { "aria-label": "log file", onchange: () => change({ file: names.value }, true) });
  const told = el("span", { class: "muted" });
  const older = el("button", { class: "plain", hidden: true, onclick: () => goBack() }, "older lines");
  const text = el("pre", { class: "log", tabindex: "0", "aria-label": "log" });
  const empty = el("div", { class: "empty", hidden: true });
  replace(root, el("div", { class: "tools" }, which, names, told), empty, older, text);

  async function update(state) {
    const isNewest = asked();
    const found = await context.chosen();
    const picked = pickedOf(found);
    const there = picked ? await context.api.logFiles(picked.id) : [];
    if (!isNewest()) return;
    [runs, run, files] = [found, picked, there];
    drawPicker(which, runs, run, (of) => change({ of, file: null }, true));
    empty.hidden = files.length > 0;
    names.hidden = text.hidden = told.hidden = !files.length;
    if (!files.length) {
      older.hidden = true;
      key = "";
      const why = run?.error && [" Why it ", run.state, " is among its ", el("a", { href: `#alarms?runs=${run.id}` }, "alarms"), "."];
      redraw(empty, [run?.id, run?.state], () => [run ? "No worker of this run has printed anything into its logs folder." : "Choose a run to read what its workers printed.", why].flat());
      return;
    }
    const file = files.find((one) => one.file === state.file) ?? newestOf(files);
    redraw(names, [file.file, files.map((one) => [one.file, one.size])], () => files.map((one) => el("option", { value: one.file, selected: one.file === file.file }, `${one.file} (${number(one.size)} bytes)`)));
    setText(told, context.isLive ? `written to ${ago(file.changed, Date.now() / 1000)}` : "");
    const wanted = JSON.stringify([run.id, file.file]);
    const goesOn = wanted === key && file.size >= end && file.size < end + FAR;
    if (!goesOn) await load(file.file, wanted);
    else if (file.size > end) await goOn(file.file);
  }

  /** The end of the file. */
  async function load(file, wanted) {
    const isNewest = loading();
    const page = await context.api.log(run.id, file, {});
    if (!isNewest()) return;
    setText(text, page.text);
    [key, start, end] = [wanted, page.start, page.end];
    older.hidden = start === 0;
    text.scrollTop = text.scrollHeight;
  }

  /** What was written since; the view follows where it stood at the end. */
  async function goOn(file) {
    const isNewest = loading();
    const page = await context.api.log(run.id, file, { after: end });
    if (!isNewest()) return;
    const follows = text.scrollTop + text.clientHeight >= text.scrollHeight - 30;
    text.append(page.text);
    end = page.end;
    if (follows) text.scrollTop = text.scrollHeight;
  }

  async function goBack() {
    const isNewest = loading();
    const page = await context.api.log(run.id, JSON.parse(key)[1], { before: start });
    if (!isNewest()) return;
    const height = text.scrollHeight;
    text.prepend(page.text);
    start = page.start;
    older.hidden = start === 0 || page.end === page.start;
    text.scrollTop += text.scrollHeight - height;
  }

  return {
    update,
    async tick() {
      await (isAlive(runs) ? update(read()) : context.chosen());
    },
  };
}

/** The file that was written to last: where a run that failed has most likely said why. */
const newestOf = (files) => files.reduce((best, one) => (one.changed > best.changed ? one : best));
