// A chat whose answers show where their prompts were computed, why, and in which stages.
import { ask, byId, el, events, failure, ms, shortId } from "./dom.js";
import { stageBar } from "./stages.js";

const messages = [];

async function answer(row, text) {
  const began = performance.now();
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", "x-tandem-timeline": "true" },
    body: JSON.stringify({
      model: byId("chat-model").value,
      messages: [...messages, { role: "user", content: text }],
      max_tokens: Number(byId("chat-tokens").value),
      stream: true,
    }),
  });
  if (!response.ok) throw new Error(await failure(response));
  const body = row.appendChild(el("p", "text"));
  let timeline = null;
  let first = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      if (choice.delta?.content) first ??= performance.now() - began;
      body.textContent += choice.delta?.content ?? "";
      timeline = choice.tandem ?? timeline;
    }
  }
  messages.push({ role: "user", content: text }, { role: "assistant", content: body.textContent });
  const header = (name) => response.headers.get(`x-tandem-${name}`) ?? "";
  row.append(el("small", "", `Prompt computed ${timeline?.prefill ?? header("prefill")}: ${header("prefill-reason")}. ` +
    `Decode worker ${shortId(header("decode-instance"))}. First text here after ${ms(first)}, ` +
    `whole answer after ${ms(performance.now() - began)}.`));
  if (timeline) row.append(stageBar(timeline.timeline_ms).whole);
}

byId("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const message = byId("message");
  const row = byId("answers").appendChild(el("article", "answer"));
  row.append(el("strong", "", message.value));
  const button = byId("chat").querySelector("button");
  button.disabled = true;
  try {
    await answer(row, message.value);
    message.value = "";
  } catch (error) {
    row.append(el("p", "error", error.message));
  }
  button.disabled = false;
});
