// Latencies against their targets, the reasons of placements, the last handoffs.
import { byId, el, keep, ms, setText, shortId } from "./dom.js";
import { stageBar } from "./stages.js";

const KINDS = { ttft: "Time to first token (TTFT)", itl: "Time between tokens (ITL)" };
const CAUSES = {
  asked: "the request asked for it",
  prompt_logprobs: "the prompt's log probabilities are wanted",
  policy: "the policy sends all prompts there",
  no_prefill_worker: "there is no prefill worker",
  queue_lost: "the prefill queue cannot be reached: look at NATS",
  short: "short: at most max_local_prefill_length tokens to compute",
  queue_full: "the prefill queue is full: max_prefill_queue_size prompts wait",
  long: "long: over max_local_prefill_length tokens to compute",
  unmeasured: "no step cost is known here: the length decides",
  faster: "predicted to delay answers less than locally",
  slower: "a remote prefill is predicted to delay answers more",
  target: "only this place keeps the targets",
  no_blocks: "too few free KV blocks to receive it",
  silent: "no prefill worker has reported its load lately",
  tried: "now and then at an idle place that seems worse",
  fallback: "a remote prefill was given up",
};
const inWords = (cause) => CAUSES[cause] ?? cause;
const SVG = "http://www.w3.org/2000/svg";

function makeLatency() {
  const row = el("div", "latency");
  const chart = document.createElementNS(SVG, "svg");
  chart.setAttribute("viewBox", "0 0 100 40");
  chart.setAttribute("preserveAspectRatio", "none");
  chart.setAttribute("aria-hidden", "true");
  chart.append(document.createElementNS(SVG, "line"), document.createElementNS(SVG, "polyline"));
  row.append(el("strong"), el("span", "verdict"), el("span", "numbers"), chart);
  return row;
}

function updateLatency(row, latency) {
  setText(row.querySelector("strong"), `${KINDS[latency.kind]} of ${latency.model}`);
  const missed = isMissed(latency);
  const verdict = row.querySelector(".verdict");
  verdict.className = `verdict ${latency.target_ms === null ? "" : missed ? "missed" : "kept"}`;
  setText(verdict, latency.target_ms === null ? "no target" : missed ? "✗ target missed" : "✓ target kept");
  const target = latency.target_ms === null ? "" : `, target ${ms(latency.target_ms)}`;
  setText(row.querySelector(".numbers"),
    `median ${ms(latency.median_ms)}, 95 % under ${ms(latency.p95_ms)}${target}`);
  const values = latency.p95s_ms;
  const top = 1.1 * Math.max(1e-9, latency.target_ms ?? 0, ...values.filter((value) => value !== null));
  const y = (value) => 40 - (38 * value) / top;
  const points = values.map((value, i) => [(100 * i) / Math.max(1, values.length - 1), value])
    .filter(([, value]) => value !== null);
  if (points.length === 1) points.push([points[0][0] + 1, points[0][1]]);
  row.querySelector("polyline").setAttribute("points", points.map(([x, v]) => `${x},${y(v)}`).join(" "));
  const line = row.querySelector("line");
  const height = latency.target_ms === null ? -9 : y(latency.target_ms);
  for (const [name, value] of Object.entries({ x1: 0, x2: 100, y1: height, y2: height })) line.setAttribute(name, value);
}

const isMissed = (latency) =>
  latency.target_ms !== null && latency.p95_ms !== null && latency.p95_ms > latency.target_ms;

export function showLatencies(state) {
  const shown = state.latencies.filter((latency) => latency.num > 0);
  keep(byId("latencies"), shown, (each) => `${each.model} ${each.kind}`, makeLatency, updateLatency);
  byId("no-latency").hidden = shown.length > 0;
  const minutes = state.window_s < 90 ? `${Math.round(state.window_s)} s` : `${Math.round(state.window_s / 60)} min`;
  setText(byId("window"), `Answers of this frontend in the last ${minutes}; the line is the slowest 5 %, dashes are the target.`);
  return shown.filter(isMissed).map((each) => `the ${each.kind.toUpperCase()} target of ${each.model} is missed`);
}

function makePlacement(each) {
  const row = el("li", "placement");
  const bar = el("div", "bar");
  bar.append(el("i", each.place === "local" ? "s1" : "s3"));
  bar.setAttribute("aria-hidden", "true");
  row.append(el("span", `place ${each.place}`, each.place), el("span", "why"), bar, el("small"));
  return row;
}

export function showPlacements(state) {
  const total = state.placements.reduce((sum, each) => sum + each.num, 0);
  keep(byId("placements"), state.placements, (each) => `${each.place} ${each.cause}`, makePlacement, (row, each) => {
    setText(row.querySelector(".why"), `${each.num} × ${inWords(each.cause)}`);
    row.querySelector(".bar i").style.width = `${(100 * each.num) / total}%`;
    setText(row.querySelector("small"), `last: ${each.example}`);
  });
  byId("no-placement").hidden = total > 0;
}

export const idleAlerts = (state) => state.idle_prefill.map((each) =>
  `${each.num_idle} prefill workers of ${each.model} idle while prompts wait at ${shortId(each.decode_instance)}` +
  (each.cause ? `; most local prompts: ${inWords(each.cause)}` : ""));

export function showHandoffs(state) {
  keep(byId("handoffs"), [...state.handoffs].reverse(), (each) => each.number, (each) => {
    const row = el("li", "handoff");
    const { whole, total } = stageBar(each.timeline_ms);
    const from = each.prefill_instance ? shortId(each.prefill_instance) : "no worker";
    const end = each.place === "remote" ? "" : ", given up: computed locally";
    row.append(el("span", "", `${from} → ${shortId(each.decode_instance)}, ${ms(total)}${end}`), whole);
    return row;
  }, () => {});
  byId("no-handoff").hidden = state.handoffs.length > 0;
}
