// The stages of a prompt as one bar, from the timeline that the API gives to clients too.
import { el, ms } from "./dom.js";

// The stage that ends an interval: its name and its color, in the order of a handoff.
const ENDS = {
  queued: ["placement", "s0"],
  claimed: ["queue", "s1"],
  prefix_pulled: ["prefix pull", "s2"],
  computed: ["compute", "s3"],
  landed: ["exposed transfer", "s4"],
  verified: ["verification", "s5"],
  first_token: ["prefill", "s3"],
  first_step: ["first step", "s6"],
};

function intervals(timeline) {
  const found = [];
  let begin = 0;
  for (const [stage, [name, color]] of Object.entries(ENDS)) {
    const end = timeline[stage] ?? 0;
    // remotely the first token comes before the KV and ends nothing; a claim may overtake "queued"
    if (end <= begin || (stage === "first_token" && "computed" in timeline)) continue;
    found.push({ name, color, length: end - begin });
    begin = end;
  }
  return found;
}

export function stageBar(timeline) {
  const parts = intervals(timeline);
  const total = parts.reduce((sum, part) => sum + part.length, 0);
  const whole = el("div", "stages");
  const bar = el("div", "bar");
  const legend = el("p", "legend");
  for (const part of parts) {
    const piece = el("i", part.color);
    piece.style.width = `${(100 * part.length) / (total || 1)}%`;
    bar.append(piece);
    const entry = el("span");
    entry.append(el("i", part.color), `${part.name} ${ms(part.length)}`);
    legend.append(entry);
  }
  bar.setAttribute("aria-hidden", "true"); // the legend has its numbers
  whole.append(bar, legend);
  return { whole, total };
}
