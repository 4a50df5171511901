"""Requests that are about their prompt: its log probabilities, or nothing after it."""

import pytest

from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.decode.prefill_peer import PROMPT, Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's

SCORED = SamplingParams(temperature=0, logprobs=1, prompt_logprobs=True)
NOTHING = StopConditions(max_tokens=0)


async def test_a_scored_prompt_is_computed_here_under_every_policy(stage: Stage) -> None:
    for _ in range(2):  # the second time it is in the cache
        answer = await stage.ask(PROMPT, sampling=SCORED, place="remote")
        text = await answer.whole()
        assert text == stage.undisturbed(PROMPT, SamplingParams(temperature=0, logprobs=1))
        assert answer.report is not None and answer.report.place == "local"
        assert answer.report.num_cached_tokens == 0
        [scores] = answer.prompt_logprobs
        assert scores.are_of(len(PROMPT) - 1) and scores.num_top == 1


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_a_remote_prefill_of_no_answer_ends_without_its_first_token(
    stage: Stage, is_delivered: bool
) -> None:
    answer, work = await stage.handoff(PROMPT, stop=NOTHING)
    if is_delivered:
        await stage.deliver(work)
    else:
        await stage.send_first(work)
        await stage.settle(work, error="the test gave up")
    text = await answer.whole()
    assert (text.token_ids, text.finish_reason) == ([], "length")
    place = "remote" if is_delivered else "local"
    assert answer.report is not None and answer.report.place == place
    await stage.balanced()
