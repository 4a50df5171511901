"""The log probabilities of an echoed prompt, listed without holding up the streams."""

import asyncio

from tandem.frontend.generation import ChoiceRun
from tandem.frontend.openai.logprobs import CompletionLogprobs, joined
from tandem.runtime.messages import TokenLogprobs

_MAX_LISTED = 2048  # log probabilities in one go, which takes about a millisecond


async def echoed_logprobs(run: ChoiceRun) -> CompletionLogprobs | None:
    """Return those of the prompt's tokens, from the first one on. None if they are not wanted."""
    found, token_ids = run.prompt_logprobs, run.choice.prompt.token_ids
    if found is None:
        return None
    parts = [run.text.completion_logprobs(token_ids[:1], [None])]
    num_tokens = max(1, _MAX_LISTED // (1 + found.num_top))
    for start in range(0, len(found), num_tokens):
        await asyncio.sleep(0)
        end = min(len(found), start + num_tokens)
        rows = [TokenLogprobs(*row) for row in found.rows(start, end)]
        parts.append(run.text.completion_logprobs(token_ids[1 + start : 1 + end], rows))
    return joined(*parts)
