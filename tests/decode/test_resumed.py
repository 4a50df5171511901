"""An answer that another worker began: what follows is what would have followed there."""

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import CancelledRequestError, InvalidRequestError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.wire.messages import PrefillPlace, SamplingParams, StopConditions
from tests.decode.prefill_peer import PROMPT, Stage
from tests.handoff_peer import Text
from tests.services import eventually

QUESTION = [1, 55, 200, 31, 87, 412, 9, 14, 260, 33, 5]
NUM_TOKENS = 24
LOGPROB_TOLERANCE = 1e-4  # K/V of a prompt's tokens and of drawn ones come from other kernels
WAYS = {
    "greedy": SamplingParams(temperature=0, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=2**63 + 5, logprobs=0),
    "penalized": SamplingParams(
        temperature=0.8,
        top_k=40,
        seed=7,
        presence_penalty=0.8,
        frequency_penalty=0.6,
        repetition_penalty=1.2,
        logit_bias={17: 1.5},
        logprobs=1,
    ),
}
SAMPLED = SamplingParams(
    temperature=0.8, seed=3, presence_penalty=2.0, repetition_penalty=2.0, logprobs=1
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Without a prefix cache: every resumed answer computes anew what was said."""
    config = EngineConfig(
        model=str(BUNDLED_MODEL),
        device="cpu",
        block_size=8,
        threads=1,
        num_blocks=400,
        enable_prefix_cache=False,
    )
    return Engine(config, ModelRunner(config))


def finish(engine: Engine) -> dict[str, Text]:
    texts: dict[str, Text] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            text = texts.setdefault(output.request_id, Text([], []))
            text.token_ids += output.token_ids
            text.logprobs += output.logprobs or []
            text.finish_reason = output.finish_reason
            text.stop_token_id = output.stop_token_id
    engine.check_invariants()
    assert engine.block_pool.num_held == 0
    return texts


def add(engine: Engine, said: list[int], sampling: SamplingParams, stop: StopConditions) -> None:
    seq = Sequence(str(len(said)), QUESTION + said, len(QUESTION), sampling, stop)
    engine.add(seq)


def assert_resumes_everywhere(
    engine: Engine, sampling: SamplingParams, stop: StopConditions
) -> Text:
    """Cuts the answer behind each of its tokens; returns it whole."""
    add(engine, [], sampling, stop)
    whole = finish(engine)["0"]
    num_tokens = len(whole.token_ids)
    cuts = range(1, num_tokens if whole.finish_reason == "length" else num_tokens + 1)
    for cut in cuts:
        add(engine, whole.token_ids[:cut], sampling, stop)
    resumed = finish(engine)
    assert len(resumed) == len(cuts) > 3
    for cut in cuts:
        rest = resumed[str(cut)]
        assert rest.token_ids == whole.token_ids[cut:], f"cut behind {cut} tokens"
        assert (rest.finish_reason, rest.stop_token_id) == (
            whole.finish_reason,
            whole.stop_token_id,
        )
        for ours, uncut in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
            assert ours.logprob == pytest.approx(uncut.logprob, abs=LOGPROB_TOLERANCE)
            assert [each for each, _ in ours.top] == [each for each, _ in uncut.top]
    return whole


@pytest.mark.parametrize("sampling", WAYS.values(), ids=WAYS.keys())
def test_an_answer_cut_anywhere_and_resumed_is_the_uncut_one(
    engine: Engine, sampling: SamplingParams
) -> None:
    stop = StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True)
    whole = assert_resumes_everywhere(engine, sampling, stop)
    assert (len(whole.token_ids), whole.finish_reason) == (NUM_TOKENS, "length")


def test_a_stop_token_and_min_tokens_mean_the_same_behind_a_seam(engine: Engine) -> None:
    """The stop token would have been drawn early; min_tokens holds it back, then lets it go."""
    sampling = WAYS["penalized"]
    free = StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True)
    add(engine, [], sampling, free)
    drawn = finish(engine)["0"].token_ids
    stop = StopConditions(
        max_tokens=NUM_TOKENS,
        min_tokens=8,
        stop_token_ids=sorted(set(drawn[2:12])),
        ignore_eos=True,
    )
    whole = assert_resumes_everywhere(engine, sampling, stop)
    assert len(whole.token_ids) >= 8 and drawn[2] not in whole.token_ids[:8]


@pytest.mark.parametrize("num_generated", [-1, 4, 9])
def test_more_or_less_than_the_tokens_of_a_prompt_is_refused(
    engine: Engine, num_generated: int
) -> None:
    stop = StopConditions(max_tokens=20)
    seq = Sequence("r", [5, 6, 7, 8], 4 - num_generated, SamplingParams(), stop)
    with pytest.raises(InvalidRequestError, match="num_generated is") as caught:
        engine.add(seq)
    assert caught.value.param == "num_generated"


def test_an_answer_that_has_all_its_tokens_is_refused(engine: Engine) -> None:
    seq = Sequence("r", [5, 6, 7, 8], 2, SamplingParams(), StopConditions(max_tokens=2))
    with pytest.raises(InvalidRequestError, match="has its 2 tokens already"):
        engine.add(seq)


@pytest.mark.parametrize("place", ["remote", "local"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_prefill_worker_draws_the_next_token_of_an_answer_that_goes_on(
    stage: Stage, place: PrefillPlace
) -> None:
    """Penalties and min_tokens count what was said; prompt and answer are told apart."""
    free = StopConditions(max_tokens=9, ignore_eos=True)
    drawn = stage.undisturbed(PROMPT, SAMPLED, free).token_ids
    stop = StopConditions(9, min_tokens=6, stop_token_ids=sorted(set(drawn)), ignore_eos=True)
    whole = stage.undisturbed(PROMPT, SAMPLED, stop)
    assert not set(drawn) & set(whole.token_ids[:6]) and len(whole.token_ids) >= 6
    for cut in range(1, len(whole.token_ids)):
        answer = await stage.ask(
            PROMPT + whole.token_ids[:cut],
            sampling=SAMPLED,
            stop=stop,
            num_generated=cut,
            place=place,
        )
        if place == "remote":
            work = await stage.claimed()
            assert work.grant.num_generated == cut
            assert work.job.num_tokens == len(PROMPT) + cut
            await stage.deliver(work)
        rest = await answer.whole()
        assert answer.report is not None and answer.report.place == place
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.finish_reason == whole.finish_reason
        for ours, uncut in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
            assert ours.logprob == pytest.approx(uncut.logprob, abs=LOGPROB_TOLERANCE)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_comes_again_on_another_connection_ends_its_older_stream(
    stage: Stage,
) -> None:
    stop = StopConditions(max_tokens=200, ignore_eos=True)
    older = await stage.ask(PROMPT, stop=stop, request_id="one", place="local")
    await eventually(lambda: bool(older.text.token_ids))
    with pytest.raises(InvalidRequestError, match="running already"):
        await (await stage.ask(PROMPT, request_id="one", place="local")).whole()
    known = older.text.token_ids[:1]
    lost, stage.peer.node.client = stage.peer.node.client, RequestClient(RuntimeConfig(), "again")
    try:
        answer = await stage.ask(
            [*PROMPT, *known], stop=stop, request_id="one", num_generated=1, place="local"
        )
        with pytest.raises(CancelledRequestError, match="on another connection"):
            await older.whole()
        text = await answer.whole()
        assert known + text.token_ids == stage.undisturbed(PROMPT, stop=stop).token_ids
    finally:
        await stage.peer.node.client.close()
        stage.peer.node.client = lost
