// What was asked and answered: groups side by side, each token coloured by what is known of it, a question over the steps.

import { debounced, drawPicker, el, isAlive, newest, number, redraw, replace, setText, tip } from "dash/dom.js";
import { change, pickedOf, read } from "dash/state.js";

const FLAGS = ["", "wrong", "right", "unparsed", "cut off", "crashed", "timed out"];
const SCALES = { "log-prob": 6, gap: 0.2, advantage: 2 };
const MOST_FIGURES = 3; // of what a reward told besides the score, beside the score; the rest is behind a click
const LEGENDS = {
  "log-prob": "the stronger, the less likely the token was: full at −6 nats",
  gap: "the stronger, the more trainer and rollout disagree: full at 0.2 nats",
  mask: "blue: written by the policy, and learnt from · grey: read by it",
  advantage: "green: to be said more often · red: less often; full at ±2",
};

/** Opacity (0 to 0.85) and hue of a token; null where nothing is known. */
export function shade(tokens, k, by) {
  const strong = (part) => Math.min(Math.max(part, 0), 1) * 0.85;
  if (by === "log-prob") {
    const value = tokens.rollout_log_probs?.[k] ?? tokens.trainer_log_probs?.[k];
    return value === null || value === undefined ? null : { hue: 14, opacity: strong(-value / SCALES[by]) };
  }
  if (by === "gap") {
    const gap = gapOf(tokens, k);
    return gap === null ? null : { hue: 285, opacity: strong(gap / SCALES.gap) };
  }
  if (by === "mask") return tokens.mask ? { hue: tokens.mask[k] ? 215 : 0, opacity: tokens.mask[k] ? 0.25 : 0.3, grey: !tokens.mask[k] } : null;
  if (by === "advantage") {
    const value = tokens.advantages?.[k] ?? tokens.advantage;
    return value === null || value === undefined ? null : { hue: value >= 0 ? 140 : 0, opacity: strong(Math.abs(value) / SCALES.advantage) };
  }
  return null;
}

const gapOf = (tokens, k) => {
  const [one, other] = [tokens.rollout_log_probs?.[k], tokens.trainer_log_probs?.[k]];
  return [one, other].some((value) => value === null || value === undefined) ? null : Math.abs(one - other);
};

export function mount(root, context) {
  let [runs, run, steps, next, rows, key, colours] = [[], null, {}, null, [], "", ""];
  let held = null; // of a live run without a chosen step: the step that is being read, though a newer one may be there
  const [asked, loading] = [newest(), newest()];
  const which = el("span");
  const kinds = el("div", { class: "segments", role: "group", "aria-label": "train or validation" });
  const step = el("input", { type: "range", min: "0", step: "1", "aria-label": "step" });
  const stepText = el("output");
  const [back, on] = [el("button", { "aria-label": "step before", onclick: () => move(-1) }, "‹"), el("button", { "aria-label": "step after", onclick: () => move(1) }, "›")];
  const search = el("input", { type: "search", placeholder: "find text", "aria-label": "find samples" });
  const flag = el("select", { "aria-label": "which samples" }, FLAGS.map((value) => el("option", { value }, value || "all samples")));
  const by = el("select", { "aria-label": "colour of the tokens" }, ["", ...Object.keys(LEGENDS)].map((value) => el("option", { value }, value ? `colour by ${value}` : "no colours")));
  const legend = el("p", { class: "muted legendline" });
  const beside = el("button", { onclick: () => change({ beside: read().beside ? null : "1" }, true) }, "side by side");
  const list = el("div", { class: "samples" });
  const more = el("button", { class: "plain", hidden: true, onclick: () => (read().over ? showHistory(read(), loading(), next) : load(true)) }, "more");
  const note = el("p", { class: "muted" });
  const fresh = el("button", { class: "primary fresh", hidden: true, onclick: () => { held = null; scrollTo(0, 0); update(read()); } });
  step.addEventListener("input", debounced(() => pick(Number(step.value)), 80));
  search.addEventListener("input", debounced(() => change({ find: search.value || null }, true), 300));
  flag.addEventListener("change", () => change({ flag: flag.value || null }, true));
  by.addEventListener("change", () => change({ by: by.value || null }, true));
  const reading = () => { held ??= now() ?? null; };
  for (const kind_ of ["pointerdown", "keydown", "toggle"]) list.addEventListener(kind_, reading, true);
  root.addEventListener("keydown", (event) => {
    if (event.target !== document.body && event.target.matches("input, select, .tokens")) return;
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
  replace(root, el("div", { class: "tools" }, which, kinds, el("span", { class: "stepper" }, back, step, on, stepText), search, flag, by, beside), legend, list, note, more, fresh);

  const kind = () => read().kind ?? (steps.val?.length ? "val" : "train");
  const now = () => {
    const own = steps[kind()] ?? [];
    const wanted = read().step ?? held ?? undefined;
    return wanted === undefined ? own.at(-1) : own.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), own[0]);
  };
  const go = (patch) => { held = null; change(patch, true); };
  const pick = (place) => change({ step: (steps[kind()] ?? [])[place] }, true);
  const move = (by_) => {
    const own = steps[kind()] ?? [];
    const place = own.indexOf(now()) + by_;
    if (place >= 0 && place < own.length) pick(place);
  };

  async function update(state) {
    const isNewest = asked();
    const found = await context.chosen();
    const picked = pickedOf(found);
    const there = picked && (await context.api.sampleSteps(picked.id));
    if (!isNewest()) return;
    if (run?.id !== picked?.id || state.step !== undefined) held = null;
    [runs, run, steps] = [found, picked, there ?? {}];
    if (!run) {
      key = "";
      replace(list, el("div", { class: "empty" }, "Choose a run to read its samples."));
      return;
    }
    drawPicker(which, runs, run, (of) => go({ of, step: null, over: null }));
    drawTools(state);
    const wanted = JSON.stringify([run.id, kind(), now(), state.find, state.flag, state.over, state.at, others(state).map((one) => one.id)]);
    if (wanted !== key) {
      key = wanted;
      await load(false);
    } else if (rows.length && colours !== (state.by ?? "")) drawRows();
  }

  function drawTools(state) {
    const known = [["train", "training"], ["val", "validation"]].filter(([one]) => steps[one]?.length);
    redraw(kinds, [known, kind()], () => known.map(([one, label]) =>
      el("button", { "aria-pressed": String(kind() === one), onclick: () => go({ kind: one, step: null, over: null }) }, label)));
    const own = steps[kind()] ?? [];
    step.max = String(Math.max(own.length - 1, 0));
    step.value = String(own.indexOf(now()));
    setText(stepText, own.length ? `step ${number(now())}` : "");
    fresh.hidden = held === null || own.at(-1) === now();
    setText(fresh, `step ${number(own.at(-1))} is there`);
    document.activeElement !== search && (search.value = state.find ?? "");
    flag.value = state.flag ?? "";
    by.value = state.by ?? "";
    beside.hidden = runs.length < 2 || kind() !== "val" || Boolean(state.over);
    beside.setAttribute("aria-pressed", String(Boolean(state.beside)));
  }

  /** The runs whose answers to the same validation questions are shown beside. */
  const others = (state) => (state.beside && !state.over && kind() === "val" ? runs.filter((one) => one.id !== run.id) : []);

  async function load(further) {
    const state = read();
    const isNewest = loading();
    if (state.over) return showHistory(state, isNewest);
    if (now() === undefined) {
      rows = [];
      replace(list, el("div", { class: "empty" }, "This run has kept no samples."));
      return undefined;
    }
    const compared = others(state);
    const found = await context.api.samples(run.id, { kind: kind(), step: now(), offset: further ? next : 0, text: state.find, flag: state.flag, limit: 48, beside: compared.map((one) => one.id).join(",") });
    if (!isNewest()) return undefined;
    found.rows.forEach((row, k) => {
      row.beside = compared.map((one) => ({ run: one, step: found.beside[one.id].step, row: found.beside[one.id].rows[k] }));
    });
    rows = further ? [...rows, ...found.rows] : found.rows;
    next = found.next;
    more.hidden = next === null;
    const searching = state.find || state.flag;
    setText(more, searching && found.size ? `search on (${Math.round((100 * (next ?? found.size)) / found.size)}% searched)` : "more samples");
    setText(note, [found.damaged ? `${found.damaged} damaged line(s) were passed over` : "", found.left_out ? `This page holds ${found.left_out}.` : ""].filter(Boolean).join(" · "));
    drawRows();
    return undefined;
  }

  function drawRows() {
    const state = read();
    colours = state.by ?? "";
    drawLegend(state);
    if (!rows.length) {
      replace(list, el("div", { class: "empty" }, next === null ? "No sample is like that." : "None so far; search on."));
      return;
    }
    const groups = new Map();
    rows.forEach((row) => groups.set(row.uid ?? row.offset, [...(groups.get(row.uid ?? row.offset) ?? []), row]));
    replace(list, [...groups.values()].map((group) => drawGroup(group, state)));
  }

  function drawLegend(state) {
    const kept = rows.filter((row) => row.tokens).length;
    const some = kept === rows.length ? "" : ` · tokens were kept of ${number(kept)} of these ${number(rows.length)} samples (trainer.log_sample_tokens)`;
    setText(legend, state.by ? LEGENDS[state.by] + some : "");
  }

  function drawGroup(group, state) {
    const first = group[0];
    const rank = (row) => row.advantage ?? row.score ?? 0;
    const sorted = [...group].sort((a, b) => rank(b) - rank(a));
    const over = kind() === "val" && (steps.val ?? []).length > 1 && !state.over;
    const history = over && el("button", { class: "plain", onclick: () => change({ over: String(first.offset), at: String(now()) }) }, "over the steps");
    return el("article", { class: "group" },
      el("header", {}, el("span", { class: "muted" }, [first.data_source, first.uid].filter(Boolean).join(" · ")), el("span", { class: "grow" }), history),
      first.prompt ? clipped(first.prompt, "prompt") : null,
      first.ground_truth ? rightAnswer(first.ground_truth) : null,
      sorted.filter((row) => row.beside?.length).map((row) => drawBeside(row, state)),
      el("div", { class: `answers${sorted.length > 1 ? "" : " one"}` }, sorted.filter((row) => !row.beside?.length).map((row) => drawAnswer(row, state))));
  }

  /** One question, answered by several runs. */
  function drawBeside(row, state) {
    const answers = [{ run, step: now(), row }, ...row.beside].map((one) => {
      const dot = el("span", { class: "dot" });
      dot.style.background = one.run.color;
      const head = el("p", { class: "whose" }, dot, el("b", {}, one.run.name), el("span", { class: "muted" }, one.step === null ? "" : ` step ${number(one.step)}`));
      return one.row ? drawAnswer(one.row, state, head) : el("section", { class: "answer" }, head, el("p", { class: "muted" }, "was not asked this"));
    });
    const node = el("div", { class: "answers beside" }, answers);
    node.style.setProperty("--runs", answers.length);
    return node;
  }

  function drawAnswer(row, state, head = null) {
    const facts = [
      row.step !== undefined && state.over ? el("b", {}, `step ${number(row.step)}`) : null,
      row.outcome ? el("span", { class: `outcome ${row.outcome}` }, row.outcome) : null,
      row.flags.includes("cut off") ? el("span", { class: "outcome cut" }, "cut off") : null,
      row.score !== null ? el("span", {}, "score ", el("b", {}, number(row.score, 3))) : null,
      row.advantage !== null ? el("span", {}, "advantage ", el("b", {}, number(row.advantage, 3))) : null,
      row.length !== null ? el("span", { class: "muted" }, `${number(row.length)} tokens`) : null,
      row.pred !== null && row.pred !== row.ground_truth ? el("span", { class: "muted" }, `read as ${row.pred.length > 120 ? `${row.pred.slice(0, 120)} …` : row.pred}`) : null,
    ];
    const known = Object.entries(row.extras).filter(([, value]) => value !== null);
    const figures = known.filter(([, value]) => typeof value === "number").slice(0, MOST_FIGURES);
    const extras = known.filter((pair) => !figures.includes(pair));
    facts.push(...figures.map(([name, value]) => el("span", { class: "muted" }, `${name} ${number(value, 3)}`)));
    const pair = ["chosen", "rejected"].filter((name) => row[name]).map((name) => el("div", { class: `pair ${name}` },
      el("p", {}, el("b", {}, name), row[name].reward === null ? "" : ` reward ${number(row[name].reward)}`), clipped(row[name].text ?? "", "text")));
    const body = row.tokens && (state.by || (!row.messages && row.tokens.mask?.includes(0))) ? tokenText(row, state.by ?? "")
      : row.messages ? conversation(row.messages) : pair.length ? null : clipped(row.response ?? "", "text");
    return el("section", { class: "answer", dataset: { outcome: row.outcome } }, head, el("p", { class: "facts" }, facts), pair, body,
      row.error ? el("details", {}, el("summary", {}, row.error.trim().split("\n").at(-1).slice(0, 300)), el("pre", {}, row.error)) : null,
      extras.length ? el("details", {}, el("summary", {}, `${extras.length} more`), el("dl", {}, extras.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, typeof value === "string" ? value : JSON.stringify(value))]))) : null);
  }

  /** The response token by token; arrow keys walk through it. */
  function tokenText(row, by_) {
    const tokens = { ...row.tokens, advantage: row.advantage };
    const spans = tokens.texts.map((text, k) => {
      const span = el("span", { class: tokens.mask && !tokens.mask[k] ? "token read" : "token", dataset: { k: String(k) } }, text);
      const look = shade(tokens, k, by_);
      if (look) span.style.backgroundColor = look.grey ? `rgba(128, 128, 128, ${look.opacity.toFixed(3)})` : `hsla(${look.hue}, 85%, 50%, ${look.opacity.toFixed(3)})`;
      return span;
    });
    const [head, missing] = tokens.left_out ?? [tokens.texts.length, 0];
    if (missing) spans[head - 1]?.append(el("span", { class: "gap" }, ` … ${number(missing)} tokens were not kept … `));
    const told = (k) => {
      const line = (label, value) => (value === null || value === undefined ? "" : `\n${label} ${number(value)}`);
      return `${JSON.stringify(tokens.texts[k])}  token ${k + 1 + (k >= head ? missing : 0)}${tokens.ids ? `, id ${tokens.ids[k]}` : ""}` + line("log-prob of rollout", tokens.rollout_log_probs?.[k]) +
        line("log-prob of trainer", tokens.trainer_log_probs?.[k]) + line("gap", gapOf(tokens, k)) + line("advantage", tokens.advantages?.[k] ?? tokens.advantage) + (tokens.mask ? `\n${tokens.mask[k] ? "written by the policy" : "read by the policy"}` : "");
    };
    let current = -1;
    const walk = (event) => {
      if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
      event.preventDefault();
      spans[current]?.classList.remove("current");
      current = Math.min(Math.max(current + (event.key === "ArrowRight" ? 1 : -1), 0), spans.length - 1);
      spans[current].classList.add("current");
      const box = spans[current].getBoundingClientRect();
      tip(told(current), box.left, box.bottom);
    };
    const hover = (event) => event.target.dataset.k !== undefined && tip(told(Number(event.target.dataset.k)), event.clientX, event.clientY);
    const unknown = by_ && !spans.some((_, k) => shade(tokens, k, by_));
    return el("div", {}, unknown ? el("p", { class: "muted" }, by_ === "gap" ? "This run is strictly on-policy: its trainer computes no log-probs before the update." : `Nothing is known of the ${by_} of these tokens.`) : null,
      el("div", { class: "text tokens", tabindex: "0", "aria-label": "response by tokens; arrow keys show values", onkeydown: walk, onmouseover: hover, onmouseleave: () => tip(""), onblur: () => tip("") }, tokens.mask?.includes(0) ? inTurns(spans, tokens.mask) : spans));
  }

  async function showHistory(state, isNewest, first = 0) {
    const found = await context.api.history(run.id, "val", Number(state.at), Number(state.over), first);
    if (!isNewest()) return;
    rows = first ? [...rows, ...found.rows] : found.rows;
    next = found.next;
    more.hidden = next === null;
    setText(more, `search on, from step ${number(next)}`);
    setText(note, "");
    drawLegend(state);
    replace(list, el("article", { class: "group" },
      el("header", {}, el("b", {}, "One question over the steps"), el("span", { class: "grow" }), el("button", { class: "plain", onclick: () => change({ over: null, at: null }) }, "back to all samples")),
      rows[0]?.prompt ? clipped(rows[0].prompt, "prompt") : null,
      rows[0]?.ground_truth ? rightAnswer(rows[0].ground_truth) : null,
      el("div", { class: "answers" }, rows.map((row) => drawAnswer(row, state)))));
  }

  async function tick() {
    if (read().step !== undefined || read().over || !isAlive(runs)) {
      await context.chosen();
      return;
    }
    if (scrollY > 40 || String(getSelection())) reading();
    await update(read());
  }

  return { update, tick, close: () => tip("") };
}

/** What the policy wrote and what it read, one after the other, as the mask tells them apart. */
function inTurns(spans, mask) {
  const turns = [];
  spans.forEach((span, k) => {
    if (!k || mask[k] !== mask[k - 1]) turns.push(el("div", { class: mask[k] ? "turn assistant" : "turn tool" }, el("b", {}, mask[k] ? "written" : "read"), el("div")));
    turns.at(-1).lastChild.append(span);
  });
  return turns;
}

function conversation(messages) {
  return el("ol", { class: "turns" }, messages.map((turn) => el("li", { class: `turn ${["user", "assistant", "tool", "system"].includes(turn.role) ? turn.role : "other"}` },
    el("b", {}, turn.role), turn.content ? clipped(turn.content, "text") : null, turn.calls ? el("pre", { class: "calls" }, turn.calls) : null)));
}

const rightAnswer = (text) => el("div", { class: "truth" }, el("span", { class: "muted" }, "right answer "), clipped(text, "answer-text", 300));

/** A long text shows its beginning, and all of it when asked. */
function clipped(text, kind, most = 1600) {
  const node = el("div", { class: kind }, text.length > most ? `${text.slice(0, most)} …` : text);
  if (text.length <= most) return node;
  const whole = el("button", { class: "plain", onclick: () => { setText(node, text); whole.remove(); } }, `show all ${number(text.length)} characters`);
  return el("div", {}, node, whole);
}
