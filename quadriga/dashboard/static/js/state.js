// What is shown is in the address: `#curves?runs=a,b&x=step`. So a view can be shared, bookmarked and gone back from.

export const VIEWS = ["runs", "curves", "samples", "time", "configuration", "alarms", "logs"];

export function read() {
  const [view, query = ""] = location.hash.slice(1).split("?");
  const values = Object.fromEntries(new URLSearchParams(query));
  return { ...values, view: VIEWS.includes(view) ? view : "runs", runs: (values.runs ?? "").split(",").filter(Boolean) };
}

/** Change some of it. `null` takes a value away. With `quiet`, no step is added to the browser's history. */
export function change(patch, quiet = false) {
  const merged = { ...read(), ...patch };
  const { view, runs, ...rest } = merged;
  const values = { ...(runs.length ? { runs: runs.join(",") } : {}), ...rest };
  const kept = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept).toString().replaceAll("%2C", ",");
  const address = `#${view}${query ? `?${query}` : ""}`;
  if (address === location.hash) return;
  if (quiet) {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = address;
}

/** The run that a view of one run shows: the one picked, else the first of those chosen. */
export const pickedOf = (runs) => runs.find((run) => run.id === read().of) ?? runs[0];

/** Own notes beside the runs: tags, kept in this browser. */
export function tagsOf(run) {
  return allTags()[run] ?? [];
}

export function allTags() {
  try {
    return JSON.parse(localStorage.getItem("quadriga tags") ?? "{}");
  } catch {
    return {};
  }
}

export function setTags(run, tags) {
  const all = { ...allTags(), [run]: tags };
  if (!tags.length) delete all[run];
  try {
    localStorage.setItem("quadriga tags", JSON.stringify(all));
  } catch {
    // a page opened from disk may have no storage; the tags then last as long as the page
  }
}
