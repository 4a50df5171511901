"""The log probabilities of a prompt, listed without holding up the streams."""

import asyncio
from collections.abc import AsyncIterator

import msgspec

from tandem.frontend.chat.logprobs import CompletionLogprobs, finite, joined
from tandem.frontend.chat.responses import PromptLogprob, PromptTokens
from tandem.frontend.generation.generation import ChoiceRun
from tandem.runtime.wire.messages import TokenLogprobs
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs

Row = tuple[float, list[tuple[int, float]]]  # logprob and likeliest (token id, logprob)
_MAX_LISTED = 2048  # log probabilities in one go, which takes about a millisecond


async def echoed_logprobs(run: ChoiceRun) -> CompletionLogprobs | None:
    """Return those of an echoed prompt, from its first token on. None if they are not wanted."""
    found, token_ids = run.prompt_logprobs, run.choice.prompt.token_ids
    if found is None or not run.choice.prompt.has_echoed_logprobs:
        return None
    parts = [run.text.completion_logprobs(token_ids[:1], [None])]
    async for start, rows in _rows(found):
        some = token_ids[1 + start : 1 + start + len(rows)]
        listed = [run.text.trimmed(TokenLogprobs(*row)) for row in rows]
        parts.append(run.text.completion_logprobs(some, listed))
    return joined(*parts)


async def prompt_logprobs(run: ChoiceRun, num_top: int | None) -> PromptTokens:
    """Return each token of a prompt and the `num_top` likeliest ones, by token id, as vLLM does.

    Without a number they are not wanted.
    """
    found, token_ids = run.prompt_logprobs, run.choice.prompt.token_ids
    if found is None or num_top is None:
        return msgspec.UNSET
    listed: list[dict[str, PromptLogprob] | None] = [None]
    async for start, rows in _rows(found):
        for token_id, (logprob, top) in zip(token_ids[1 + start :], rows, strict=False):
            by_id = {
                each: PromptLogprob(finite(value), rank, run.text.token_text(each))
                for rank, (each, value) in enumerate(top[:num_top], 1)
            }
            if token_id not in by_id:
                text = run.text.token_text(token_id)
                ranks = [rank for rank, (each, _) in enumerate(top, 1) if each == token_id]
                by_id[token_id] = PromptLogprob(finite(logprob), next(iter(ranks), None), text)
            listed.append({str(each): value for each, value in by_id.items()})
    return listed


async def _rows(found: PromptLogprobs) -> AsyncIterator[tuple[int, list[Row]]]:
    """Yield the rows in parts, each with the position of its first one."""
    num_tokens = max(1, _MAX_LISTED // (1 + found.num_top))
    for start in range(0, len(found), num_tokens):
        await asyncio.sleep(0)
        yield start, found.rows(start, min(len(found), start + num_tokens))
