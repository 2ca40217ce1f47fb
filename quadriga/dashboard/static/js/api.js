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
  history: (run, kind, step, offset) => ask("history", { run, kind, step, offset }),
  timelineSteps: (run) => ask("timeline_steps", { run }),
  timeline: (run, first, last) => ask("timeline", { run, first, last }),
  events: (run) => ask("events", { run }),
  stall: (run, file) => ask("stall", { run, file }),
  config: (ids) => ask("config", { ids: ids.join(",") }),
};

const one = (run) => {
  if (!exported.runs[run]) throw new Problem("this run is not in the exported page");
  return exported.runs[run];
};
const contains = (row, text) => JSON.stringify([row.prompt, row.response, row.ground_truth, row.pred, row.uid]).toLowerCase().includes(text);

const file = exported && {
  async runs({ text = "", state = "", ids = "" } = {}) {
    const wanted = ids.split(",").filter(Boolean);
    const all = exported.table.rows;
    const rows = all.filter((row) =>
      (!state || row.state === state) && (!wanted.length || wanted.includes(row.id)) &&
      text.toLowerCase().split(/\s+/).every((word) => JSON.stringify([row.name, row.kind, row.state, row.changed]).toLowerCase().includes(word)));
    return { ...exported.table, rows, total: rows.length };
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
  async samples(run, { kind, step, text = "", flag = "" }) {
    const rows = (one(run).samples[`${kind} ${step}`] ?? []).filter(
      (row) => (!flag || row.flags.includes(flag)) && (!text || contains(row, text.toLowerCase())));
    return { rows, next: null, damaged: 0, size: 0, searched: 0 };
  },
  async history(run, kind, step, offset) {
    const asked = one(run).samples[`${kind} ${step}`]?.find((row) => row.offset === offset);
    return one(run).sample_steps[kind].flatMap((other) => {
      const row = one(run).samples[`${kind} ${other}`].find((r) => r.prompt === asked?.prompt && r.sample === asked?.sample);
      return row ? [{ ...row, step: other }] : [];
    });
  },
  timelineSteps: async (run) => one(run).timeline_steps,
  timeline: async (run, first) => one(run).timelines[first] ?? { lanes: [], events: [], origin: null, more: false },
  events: async (run) => one(run).events,
  stall: async (run, name) => ({ text: one(run).stalls[name] ?? "" }),
  async config(ids) {
    const { runs, keys, problems } = exported.config;
    const places = ids.map((id) => runs.indexOf(id));
    const chosen = keys.map((key) => {
      const values = places.map((place) => key.values[place] ?? null);
      const differs = values.some((value) => JSON.stringify(value) !== JSON.stringify(values[0]));
      return { ...key, values, set: places.map((place) => key.set[place] ?? false), differs };
    });
    return { runs: ids, keys: chosen, problems };
  },
};

export const api = file ?? server;
