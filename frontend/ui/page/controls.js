// Live thresholds and roles: each change is one request, and each can be undone.
import { ask, byId, el, failure, keep, setOptions, setText, shortId } from "./dom.js";

const EVERY_MODEL = "all models";
const HOLD_MS = 3000; // a control keeps its value until the workers have taken the change over
const SETTLE_MS = 300; // the arrow keys make many small changes, which are sent as one
const CONTROLS = [
  { key: "policy", label: "Policy", values: ["adaptive", "threshold", "always_local", "always_remote"],
    note: "who decides where a prompt is computed" },
  { key: "max_local_prefill_length", label: "Longest local prompt", unit: "tokens", min: 0, max: 8192, step: 16,
    note: "max_local_prefill_length: prompts with more uncached tokens may go to a prefill worker" },
  { key: "max_prefill_queue_size", label: "Full prefill queue", unit: "prompts", min: 1, max: 64, step: 1,
    note: "max_prefill_queue_size, for policy threshold: with so many waiting, prompts stay local" },
  { key: "ttft_target_ms", label: "TTFT target", unit: "ms", min: 0, max: 5000, step: 10, optional: true,
    note: "time to the first token; 0 is no target" },
  { key: "itl_target_ms", label: "ITL target", unit: "ms", min: 0, max: 500, step: 1, optional: true,
    note: "longest time between two tokens; 0 is no target" },
];
const undos = [];

const inWords = (control, value) =>
  control.values ? value : control.optional && !value ? "none" : `${value} ${control.unit}`;

function report(text, isError = false) {
  byId("outcome").className = isError ? "error" : "";
  setText(byId("outcome"), text);
  const last = undos.at(-1);
  byId("undo").disabled = !last;
  setText(byId("undo"), last ? `Undo: ${last.name}` : "Undo");
}

// Send a change; `undoOf` makes the request that takes it back from the answer.
async function change(path, method, name, undoOf) {
  try {
    const response = await ask(path, { method });
    if (!response.ok) throw new Error(await failure(response));
    const answer = await response.json();
    if (undoOf) undos.push({ name, ...undoOf(answer) });
    report(`Done: ${name}`);
    return true;
  } catch (error) {
    report(`Not done: ${name}: ${error.message}`, true);
    return false;
  }
}

function configPath(key, scope, value) {
  const query = new URLSearchParams(scope === EVERY_MODEL ? {} : { model: scope });
  if (value !== undefined) query.set("value", value);
  return `/ui/config/disagg.${key}?${query}`;
}

function setValue(control, text) {
  const scope = byId("scope").value;
  const value = control.optional && Number(text) === 0 ? "null" : text;
  const name = `${control.label} ${inWords(control, control.values ? text : Number(text))}`;
  return change(configPath(control.key, scope, value), "PUT", name, ({ was }) => was === undefined
    ? { path: configPath(control.key, scope), method: "DELETE" }
    : { path: configPath(control.key, scope, typeof was === "string" ? was : JSON.stringify(was)), method: "PUT" });
}

export function changeRole(worker, role) {
  const path = (name) => `/ui/role/${worker.id}?role=${name}`;
  report(`Changing worker ${shortId(worker.id)} to ${role}, for 30 s at most`);
  return change(path(role), "PUT", `worker ${shortId(worker.id)} is ${role}`,
    () => ({ path: path(worker.role), method: "PUT" }));
}

function makeControl(control) {
  const row = el("div", "control");
  const input = el(control.values ? "select" : "input");
  input.id = `control-${control.key}`;
  const label = el("label", "", control.label);
  label.htmlFor = input.id;
  if (control.values) setOptions(input, control.values);
  else Object.assign(input, { type: "range", min: control.min, max: control.max, step: control.step });
  const note = el("small", "", control.note);
  note.id = `${input.id}-note`;
  input.setAttribute("aria-describedby", note.id);
  const output = el("output");
  output.htmlFor = input.id;
  const hold = () => {
    row.heldUntil = performance.now() + HOLD_MS;
    setText(output, inWords(control, control.values ? input.value : Number(input.value)));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", hold);
  let settling = 0;
  input.addEventListener("change", () => {
    hold();
    clearTimeout(settling);
    settling = setTimeout(async () => {
      if (!(await setValue(control, input.value))) row.heldUntil = 0;
    }, SETTLE_MS);
  });
  row.append(label, control.values ? input : output, ...(control.values ? [] : [input]), note);
  return row;
}

function updateControl(row, control, value) {
  if (performance.now() < (row.heldUntil ?? 0)) return;
  const input = row.querySelector("input, select");
  if (!control.values) input.max = Math.max(control.max, value);
  input.value = value;
  const output = row.querySelector("output");
  if (output) setText(output, inWords(control, value));
  input.setAttribute("aria-valuetext", inWords(control, value));
}

export function showControls(state) {
  const models = Object.keys(state.thresholds).sort();
  setOptions(byId("scope"), [EVERY_MODEL, ...models]);
  setOptions(byId("chat-model"), models);
  const values = state.thresholds[byId("scope").value] ?? state.thresholds[models[0]];
  keep(byId("controls"), values ? CONTROLS : [], (control) => control.key, makeControl, (row, control) =>
    updateControl(row, control, values[control.key] ?? 0));
}

byId("undo").addEventListener("click", async () => {
  const last = undos.pop();
  if (!(await change(last.path, last.method, `undone: ${last.name}`))) undos.push(last);
  report(byId("outcome").textContent);
});
