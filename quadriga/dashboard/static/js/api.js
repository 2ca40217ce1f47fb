// Where the data come from: the server, or, in a page that was exported, the page itself. Both answer the same questions.

const held = document.getElementById("exported");
export const exported = held ? JSON.parse(held.textContent) : null;

export class Problem extends Error {}

async function ask(name, values = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    if (Array.isArray(value)) value.forEach((one) => query.append(key, one));
    else if (value !== undefined && value !== null && value !== "") query.append(key, value);
  }
  let answer;
  try {
    answer = await fetch(`api/${name}?${query}`, { cache: "no-store" });
  } catch {
    throw new Problem("the server does not answer; is `quadriga dash` still running?");
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Problem(body.problem ?? `the server answered ${answer.status}`);
  return body;
}

const server = {
  runs: (query) => ask("runs", query),
  metrics: (run) => ask("metrics", { run }),
  series: (run, metric, x, from, to, points) => ask("series", { run, metric, x, from, to, points }),
  sampleSteps: (run) => ask("sample_steps", { run }),
  samples: (run, query) => ask("samples", { run, ...query }),
  history: (run, kind, step, offset, first) => ask("history", { run, kind, step, offset, first }),
  timelineSteps: (run) => ask("timeline_steps", { run }),
  timeline: (run, first, last) => ask("timeline", { run, first, last }),
  events: (run) => ask("events", { run }),
  stall: (run, file) => ask("stall", { run, file }),
  logFiles: (run) => ask("log_files", { run }),
  log: (run, file, place) => ask("log", { run, file, ...place }),
  config: (ids) => ask("config", { ids: ids.join(",") }),
};

const one = (run) => {
  if (!exported.runs[run]) throw new Problem("this run is not in the exported page");
  return exported.runs[run];
};
const newestOf = (run, name) => exported.runs[run]?.metrics.find((metric) => metric.name === name)?.last ?? null;
const text_ = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));

/** The same orders as the server's. */
function sorted(rows, by, down) {
  const highest = (row) => Math.max(...Object.values(row.validations).map((seen) => seen.last ?? -Infinity));
  const keys = { name: (row) => row.name.toLowerCase(), state: (row) => -exported.states.indexOf(row.state), step: (row) => row.step, eta: (row) => row.eta_s,
    main: (row) => row.main?.value ?? null, validation: (row) => (Object.keys(row.validations).length ? highest(row) : null), updated: (row) => row.updated };
  const key = by.startsWith("metric ") ? (row) => newestOf(row.id, by.slice(7)) : keys[by] ?? keys.updated;
  const known = rows.filter((row) => key(row) !== null);
  known.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1));
  return [...known, ...rows.filter((row) => key(row) === null)];
}

/** What another run answered to the same questions, at its step nearest to `step`. */
function answersOf(run, kind, step, rows) {
  const steps = one(run).sample_steps[kind] ?? [];
  const nearest = steps.reduce((best, own) => (best === null || Math.abs(own - step) < Math.abs(best - step) ? own : best), null);
  const found = nearest === null ? [] : one(run).samples[`${kind} ${nearest}`];
  return { step: nearest, rows: rows.map((row) => found.find((other) => other.prompt === row.prompt && other.sample === row.sample) ?? null) };
}

const contains = (row, text) => JSON.stringify([row.prompt, row.response, row.ground_truth, row.pred, row.uid]).toLowerCase().includes(text);

const file = exported && {
  async runs({ text = "", state = "", ids = "", sort = "updated", order = "down", column = [] } = {}) {
    const wanted = ids.split(",").filter(Boolean);
    const all = exported.table.rows;
    const rows = all.filter((row) =>
      (!state || row.state === state) && (!wanted.length || wanted.includes(row.id)) &&
      text.toLowerCase().split(/\s+/).every((word) => JSON.stringify([row.name, row.kind, row.state, row.changed]).toLowerCase().includes(word)));
    const columns = rows.map((row) => ({ ...row, columns: column.map((name) => text_(newestOf(row.id, name))) }));
    return { ...exported.table, rows: sorted(columns, sort, order === "down"), total: rows.length };
  },
  metrics: async (run) => one(run).metrics,
  async series(run, names, x, from = -Infinity, to = Infinity) {
    const found = {};
    for (const name of names) {
      const whole = one(run).series[x]?.[name];
      if (!whole) continue;
      const inside = whole.x.map((value) => value >= from && value <= to);
      found[name] = Object.fromEntries(Object.entries(whole).map(([key, values]) => [key, values.filter((_, k) => inside[k])]));
    }
    return found;
  },
  sampleSteps: async (run) => one(run).sample_steps,
  async samples(run, { kind, step, text = "", flag = "", beside = "" }) {
    const rows = (one(run).samples[`${kind} ${step}`] ?? []).filter(
      (row) => (!flag || row.flags.includes(flag)) && (!text || contains(row, text.toLowerCase())));
    const others = beside.split(",").filter(Boolean).map((id) => [id, answersOf(id, kind, step, rows)]);
    return { rows: rows.map((row) => ({ ...row })), left_out: one(run).samples_left_out, next: null, damaged: 0, size: 0, searched: 0, beside: Object.fromEntries(others) };
  },
  async history(run, kind, step, offset) {
    const asked = one(run).samples[`${kind} ${step}`]?.find((row) => row.offset === offset);
    const rows = one(run).sample_steps[kind].flatMap((other) => {
      const row = one(run).samples[`${kind} ${other}`].find((r) => r.prompt === asked?.prompt && r.sample === asked?.sample);
      return row ? [{ ...row, step: other }] : [];
    });
    return { rows, next: null };
  },
  timelineSteps: async (run) => ({ ...one(run).timeline_steps, left_out: one(run).timeline_left_out }),
  timeline: async (run, first) => one(run).timelines[first] ?? { lanes: [], events: [], busy: [], more: false },
  events: async (run) => one(run).events,
  stall: async (run, name) => ({ text: one(run).stalls[name] ?? "" }),
  logFiles: async (run) => one(run).log_files,
  log: async (run, name) => one(run).logs[name] ?? { text: "", start: 0, end: 0, size: 0 },
  async config(ids) {
    const { runs, keys, problems } = exported.config;
    const places = ids.map((id) => runs.indexOf(id));
    const chosen = keys.map((key) => {
      const values = places.map((place) => key.values[place] ?? null);
      const set = places.map((place) => key.set[place] ?? false);
      const there = values.filter((value) => value !== null).map((value) => JSON.stringify(value));
      const differs = there.some((value) => value !== there[0]) || (there.length < values.length && set.some(Boolean)); // as the server has it
      return { ...key, values, set, differs };
    });
    return { runs: ids, keys: chosen, problems };
  },
};

export const api = file ?? server;
