"""The writer that answers once, when all choices have ended."""

import asyncio
from collections.abc import Awaitable

import msgspec

from tandem.frontend.chat.logprobs import CompletionLogprobs, joined
from tandem.frontend.chat.responses import (
    ChatChoice,
    ChatMessageOut,
    CompletionChoice,
    FunctionCall,
    PromptTokens,
    TokenIds,
    ToolCall,
    WholeResponse,
    finish_reason_of,
)
from tandem.frontend.generation.generation import Answer, ChoiceRun
from tandem.frontend.openai.echoed import echoed_logprobs, prompt_logprobs
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, ToolCallDelta
from tandem.runtime.wire.messages import TokenDelta, TokenLogprobs

_encode = msgspec.json.Encoder().encode


class _Choice(msgspec.Struct):
    """The pieces of one choice so far."""

    texts: list[str] = []
    reasonings: list[str] = []
    tool_calls: dict[int, ToolCall] = {}  # by index, in their order
    token_ids: list[int] = []
    listed: list[int] = []  # those with logprobs
    logprobs: list[TokenLogprobs] = []

    def add(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                self.texts.append(text)
            case Reasoning(text):
                self.reasonings.append(text)
            case ToolCallDelta():
                self._add_to_call(piece)

    def message(self, *, calls_functions: bool) -> ChatMessageOut:
        content = "".join(self.texts)
        calls = list(self.tool_calls.values())
        return ChatMessageOut(
            None if calls and not content else content,
            reasoning_content="".join(self.reasonings) or msgspec.UNSET,
            tool_calls=msgspec.UNSET if calls_functions or not calls else calls,
            function_call=calls[0].function if calls_functions and calls else msgspec.UNSET,
        )

    def _add_to_call(self, piece: ToolCallDelta) -> None:
        call = self.tool_calls.get(piece.index) or ToolCall(piece.id, FunctionCall(piece.name, ""))
        function = FunctionCall(call.function.name, call.function.arguments + piece.arguments)
        self.tool_calls[piece.index] = ToolCall(call.id, function)


class WholeWriter:
    """Answers with one JSON body."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = [_Choice() for _ in answer.runs]
        self._has_logprobs = answer.plan.body.num_logprobs is not None
        self._has_token_ids = bool(answer.plan.body.return_token_ids)

    async def begin(self, run: ChoiceRun) -> bytes:
        return b""  # nothing is sent yet

    def take(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        choice = self._choices[run.choice.index]
        if not self._has_token_ids and not self._has_logprobs:
            for piece in run.text.take(deltas):
                choice.add(piece)
            return b""
        for delta in deltas:
            for piece in run.text.take([delta]):
                choice.add(piece)
            choice.token_ids += run.text.taken(delta)
            if delta.logprobs is not None and self._has_logprobs:
                listed, logprobs = run.text.with_logprobs(delta)
                choice.listed += listed
                choice.logprobs += logprobs
        return b""

    async def end(self, run: ChoiceRun) -> bytes:
        if self._answer.num_open:
            return b""
        answer, head = self._answer, self._answer.plan.head
        choices: list[ChatChoice | CompletionChoice] = []
        for each in answer.runs:
            if choices:
                await asyncio.sleep(0)  # log probabilities of many choices hold up the streams
            choices.append(await self._choice(each))
        response = WholeResponse(
            head.response_id,
            head.created_s,
            head.model,
            choices,
            answer.usage(),
            "chat.completion" if head.is_chat else "text_completion",
            await self._prompt_logprobs(answer.runs[0]) if head.is_chat else msgspec.UNSET,
            self._prompt_token_ids(answer.runs[0]) if head.is_chat else msgspec.UNSET,
        )
        return _encode(response)

    def _prompt_logprobs(self, run: ChoiceRun) -> Awaitable[PromptTokens]:
        return prompt_logprobs(run, self._answer.plan.body.prompt_logprobs)

    def _prompt_token_ids(self, run: ChoiceRun) -> TokenIds:
        return run.choice.prompt.token_ids if self._has_token_ids else msgspec.UNSET

    def _token_ids(self, run: ChoiceRun) -> TokenIds:
        """Return the tokens of an answer, with the one that ended it."""
        if not self._has_token_ids:
            return msgspec.UNSET
        end = run.text.stop_token_id
        return self._choices[run.choice.index].token_ids + ([] if end is None else [end])

    async def _choice(self, run: ChoiceRun) -> ChatChoice | CompletionChoice:
        assert run.text.finish_reason is not None
        index, text = run.choice.index, run.text
        choice, timeline = self._choices[index], self._answer.timeline(run)
        listed_ids, logprobs = choice.listed, choice.logprobs
        head = self._answer.plan.head
        if head.is_chat:
            return ChatChoice(
                index,
                choice.message(calls_functions=head.calls_functions),
                text.chat_logprobs(listed_ids, logprobs) if logprobs else None,
                finish_reason_of(
                    run.text.finish_reason,
                    bool(choice.tool_calls) and not text.is_call_cut,
                    calls_functions=head.calls_functions,
                ),
                timeline,
                self._token_ids(run),
            )
        echoed: CompletionLogprobs | None = None
        scored: PromptTokens = msgspec.UNSET
        if run.prompt_logprobs is not None:
            echoed, scored = await echoed_logprobs(run), await self._prompt_logprobs(run)
        listed = text.completion_logprobs(listed_ids, logprobs) if logprobs else None
        if echoed is not None:
            listed = echoed if listed is None else joined(echoed, listed)
        return CompletionChoice(
            index,
            run.choice.prompt.echo + "".join(choice.texts),
            listed,
            run.text.finish_reason,
            timeline,
            scored,
            self._token_ids(run),
            self._prompt_token_ids(run),
        )
