// The workers, their pools, the queues, and prompts on their way from prefill to decode.
import { byId, el, keep, setOptions, setText, shortId } from "./dom.js";

const ROLES = { both: "prefill and decode", decode: "decode", prefill: "prefill" };
let newestFlight = null;

function makeCard(worker, changeRole) {
  const card = el("article", "worker");
  const name = el("p", "name", shortId(worker.id));
  const state = el("p", "state");
  const label = el("label", "", "Role ");
  const role = el("select");
  setOptions(role, Object.keys(ROLES), (value) => ROLES[value]);
  role.addEventListener("change", async () => {
    card.isChanging = true;
    await changeRole(card.worker, role.value);
    card.isChanging = false;
  });
  label.append(role);
  const bar = el("div", "bar");
  bar.append(el("i", "used"), el("i", "cached"));
  bar.setAttribute("aria-hidden", "true");
  card.append(name, state, label, el("p", "work"), bar, el("p", "pool note"));
  return card;
}

function updateCard(card, worker) {
  card.worker = worker;
  card.classList.toggle("stopped", worker.is_stopped);
  const [used, cached] = card.querySelectorAll(".bar i");
  const hasPool = worker.num_blocks > 0; // that it tells of
  const share = (num) => (hasPool ? (100 * num) / worker.num_blocks : 0);
  used.style.width = `${share(worker.num_used_blocks)}%`;
  cached.style.width = `${share(worker.num_cached_blocks)}%`;
  card.setAttribute("aria-label", `worker ${shortId(worker.id)}`);
  setText(card.querySelector(".name"), `${shortId(worker.id)} · ${worker.model}`);
  const width = worker.num_ranks > 1 ? `, ${worker.num_ranks} ranks` : "";
  setText(card.querySelector(".state"), worker.is_stopped ? `■ STOPPED: ${worker.state}` : `● ${worker.state}${width}`);
  const role = card.querySelector("select");
  role.disabled = worker.is_stopped;
  role.setAttribute("aria-label", `Role of worker ${shortId(worker.id)}`);
  if (!card.isChanging && role.value !== worker.role) role.value = worker.role;
  setText(
    card.querySelector(".work"),
    `${worker.num_running} running, ${worker.num_waiting} waiting, ` +
      `${worker.num_jobs} prompts for others, ${worker.num_open_handoffs} open handoffs`,
  );
  setText(
    card.querySelector(".pool"),
    hasPool
      ? `KV pool: ${Math.round(share(worker.num_used_blocks))} % in use, ` +
          `${Math.round(share(worker.num_cached_blocks))} % cached, of ${worker.num_blocks} blocks`
      : "KV pool: not reported",
  );
}

function makeStarting() {
  const line = el("li");
  line.append(el("span"), el("progress"));
  return line;
}

function updateStarting(line, each) {
  const bar = line.querySelector("progress");
  setText(line.querySelector("span"), `◌ ${each.name} starts: ${each.line} `);
  bar.setAttribute("aria-label", `Start of ${each.name}`);
  if (each.share === null) bar.removeAttribute("value");
  else bar.value = each.share;
}

function fly(from, to) {
  const area = byId("workers");
  const base = area.getBoundingClientRect();
  const at = (card) => {
    const box = card.getBoundingClientRect();
    return `translate(${box.x - base.x + box.width / 2}px, ${box.y - base.y + box.height / 2}px)`;
  };
  const dot = area.appendChild(el("i", "flight"));
  dot.setAttribute("aria-hidden", "true");
  const flight = dot.animate([{ transform: at(from) }, { transform: at(to) }], {
    duration: 900, easing: "ease-in-out",
  });
  flight.finished.finally(() => dot.remove());
}

function showFlights(begun) {
  const cards = byId("worker-cards").known;
  const newest = Math.max(0, ...begun.map((each) => each.number));
  for (const each of begun) {
    const [from, to] = [cards.get(each.prefill_instance), cards.get(each.decode_instance)];
    if (newestFlight !== null && each.number > newestFlight && from && to) fly(from, to);
  }
  newestFlight = newest;
}

export function showWorkers(state, changeRole) {
  const sorted = [...state.workers].sort((a, b) =>
    a.role < b.role ? -1 : a.role > b.role ? 1 : a.id < b.id ? -1 : 1);
  keep(byId("worker-cards"), sorted, (worker) => worker.id, (worker) => makeCard(worker, changeRole), updateCard);
  keep(byId("starting"), state.starting, (each) => each.id, makeStarting, updateStarting);
  const queueName = ({ model, deployment }) =>
    state.queues.filter((other) => other.model === model).length > 1 ? `${model}, deployment ${deployment}` : model;
  keep(byId("queues"), state.queues, queueName, () => el("li"), (line, queue) =>
    setText(line, `Prefill queue of ${queueName(queue)}: ${queue.num_jobs} prompts wait, ${queue.num_tokens} tokens to compute`));
  keep(byId("planners"), state.planners, (line) => line, (line) => el("li", "", line), () => {});
  showFlights(state.begun);
  return state.workers.filter((worker) => worker.is_stopped)
    .map((worker) => `worker ${shortId(worker.id)} is stopped`);
}
