// What happened in a run, as marks on a step axis.

import { isDark } from "dash/dom.js";

const COLORS = {
  alarm: ["#e67700", "#ffa94d"], stall: ["#c92a2a", "#ff8787"], resumed: ["#6b6963", "#a3a29d"],
  steered: ["#0b7285", "#3bc9db"], restart: ["#c92a2a", "#ff8787"],
};

const markColor = (kind) => (COLORS[kind] ?? COLORS.resumed)[isDark() ? 1 : 0];

/** [{x: step, kind, text, color}] of the answer of `api.events`. */
export function marksOf({ events, stalls }) {
  const found = stalls.map((stall) => ({ x: stall.step, kind: "stall", text: `${stall.phase} took far longer than usual` }));
  for (const event of events) {
    if (["alarm", "steered", "restart"].includes(event.kind)) found.push({ x: event.step, kind: event.kind, text: event.text });
    else if (event.kind === "start" && event.text.startsWith("resumed")) found.push({ x: event.step, kind: "resumed", text: event.text });
  }
  return found.map((mark) => ({ ...mark, color: markColor(mark.kind) }));
}
