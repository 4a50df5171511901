// The stream of states and the parts of the page that show them.
import "./chat.js";
import { changeRole, showControls } from "./controls.js";
import { ask, byId, events, failure, setText, storeKey } from "./dom.js";
import { idleAlerts, showHandoffs, showLatencies, showPlacements } from "./panels.js";
import { showWorkers } from "./workers.js";

const RETRY_MS = 1000;

function show(state) {
  const alerts = [...showWorkers(state, changeRole), ...showLatencies(state), ...idleAlerts(state)];
  showPlacements(state);
  showHandoffs(state);
  showControls(state);
  setText(byId("alerts"), alerts.join("; "));
}

async function follow() {
  const response = await ask("/ui/states");
  byId("key-form").hidden = ![401, 403].includes(response.status);
  if (!response.ok) throw new Error(await failure(response));
  for await (const data of events(response)) {
    show(JSON.parse(data));
    byId("content").hidden = false;
    setText(byId("connection"), "live");
  }
  throw new Error("the frontend ended the stream");
}

async function followForEver() {
  for (;;) {
    try {
      await follow();
    } catch (error) {
      setText(byId("connection"), `not live: ${error.message}`);
      if (!byId("key-form").hidden) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value);
  followForEver();
});
followForEver();
