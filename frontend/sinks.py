"""What becomes of generated tokens: a stream of events, or one answer at the end."""

import msgspec

from tandem.frontend.exchange import Exchange
from tandem.frontend.generation import ChoiceRun, Generation, Services
from tandem.frontend.openai.responses import (
    ChatChoice,
    ChatCompletion,
    ChatMessageOut,
    Completion,
    CompletionChoice,
)
from tandem.frontend.openai.sse import DONE, ChunkWriter
from tandem.frontend.plan import Plan
from tandem.runtime.messages import TokenDelta

_encode_json = msgspec.json.Encoder().encode


class StreamedGeneration(Generation):
    """Answers by server-sent events; the status waits for the first token of any choice."""

    def __init__(self, plan: Plan, exchange: Exchange, services: Services) -> None:
        super().__init__(plan, exchange, services)
        self._writers = [ChunkWriter(plan.head, choice.index) for choice in plan.choices]
        self._num_open = len(plan.choices)
        self._has_logprobs = plan.choices[0].request.sampling.logprobs is not None

    async def on_first(self, run: ChoiceRun) -> None:
        if not self.exchange.is_started:
            await self.exchange.start_stream(self.headers(run))
        echo = run.choice.prompt.echo
        writer = self._writers[run.choice.index]
        begin = writer.role() + (writer.text(echo) if echo else b"")
        if begin:
            await self.exchange.write(begin)

    def on_deltas(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        writer = self._writers[run.choice.index]
        if self._has_logprobs:
            return self._take_with_logprobs(run, deltas, writer)
        take = run.text.take
        text = take(deltas[0]) if len(deltas) == 1 else "".join(map(take, deltas))
        return writer.text(text) if text else b""

    async def on_last(self, run: ChoiceRun, body: bytes) -> None:
        assert run.text.finish_reason is not None
        body += self._writers[run.choice.index].finish(run.text.finish_reason, self.course(run))
        self._num_open -= 1
        if self._num_open:
            await self.exchange.write(body)
            return
        if self.plan.head.with_usage:
            body += self.plan.head.usage_event(self.usage())
        await self.exchange.end_stream(body + DONE)

    def _take_with_logprobs(
        self, run: ChoiceRun, deltas: list[TokenDelta], writer: ChunkWriter
    ) -> bytes:
        body = b""
        for delta in deltas:
            text = run.text.take(delta)
            token_ids, logprobs = run.text.with_logprobs(delta)
            if logprobs:
                listed = (
                    run.text.chat_logprobs(token_ids, logprobs)
                    if self.plan.head.is_chat
                    else run.text.completion_logprobs(token_ids, logprobs)
                )
                body += writer.text_with_logprobs(text, listed)
            elif text:
                body += writer.text(text)
        return body


class WholeGeneration(Generation):
    """Answers once, when all choices have ended."""

    async def run(self) -> None:
        await super().run()
        plan = self.plan
        head = plan.head
        answer: ChatCompletion | Completion
        if head.is_chat:
            chats = [self._chat_choice(run) for run in self.runs]
            answer = ChatCompletion(
                head.response_id, head.created_s, head.model, chats, self.usage()
            )
        else:
            texts = [self._completion_choice(run) for run in self.runs]
            answer = Completion(head.response_id, head.created_s, head.model, texts, self.usage())
        await self.exchange.respond(200, _encode_json(answer), self.headers(self.runs[0]))

    def on_deltas(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        for delta in deltas:
            run.parts.append(run.text.take(delta))
            token_ids, logprobs = run.text.with_logprobs(delta)
            run.token_ids += token_ids
            run.logprobs += logprobs
        return b""

    def _chat_choice(self, run: ChoiceRun) -> ChatChoice:
        logprobs = run.text.chat_logprobs(run.token_ids, run.logprobs) if run.logprobs else None
        assert run.text.finish_reason is not None
        message = ChatMessageOut("".join(run.parts))
        return ChatChoice(
            run.choice.index, message, logprobs, run.text.finish_reason, self.course(run)
        )

    def _completion_choice(self, run: ChoiceRun) -> CompletionChoice:
        logprobs = (
            run.text.completion_logprobs(run.token_ids, run.logprobs) if run.logprobs else None
        )
        assert run.text.finish_reason is not None
        text = run.choice.prompt.echo + "".join(run.parts)
        return CompletionChoice(
            run.choice.index, text, logprobs, run.text.finish_reason, self.course(run)
        )
