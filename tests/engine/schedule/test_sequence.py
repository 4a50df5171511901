import pytest

from tandem.engine.schedule.sequence import Chunk, Sequence, check_limits
from tandem.runtime.errors import CapacityError, ContextLengthError, InvalidRequestError
from tandem.runtime.wire.messages import SamplingParams, StopConditions


def sequence(num_generated: int, stop: StopConditions, stop_ids: set[int]) -> Sequence:
    seq = Sequence("r", [1, 2, 3] + [9] * num_generated, 3, SamplingParams(), stop)
    seq.stop_ids = frozenset(stop_ids)
    return seq


@pytest.mark.parametrize(
    ("num_generated", "token_id", "reason"),
    [
        (0, 5, None),
        (1, 7, "stop"),
        (0, 7, None),
        (2, 5, "length"),
        (2, 7, "stop"),
        (3, 7, "length"),
    ],
)
def test_a_stop_token_ends_a_sequence_once_it_has_its_minimum(
    num_generated: int, token_id: int, reason: str | None
) -> None:
    stop = StopConditions(max_tokens=3, min_tokens=1)
    assert sequence(num_generated, stop, {7}).finish_reason_after(token_id) == reason


def test_a_sequence_counts_what_it_generated() -> None:
    seq = sequence(2, StopConditions(max_tokens=3), set())
    assert (seq.num_tokens, seq.num_generated_tokens) == (5, 2)


def test_sequences_are_told_apart_by_identity_and_chunks_unpack() -> None:
    stop = StopConditions(max_tokens=3)
    first, second = sequence(0, stop, set()), sequence(0, stop, set())
    assert first != second
    seq, start, end, samples = Chunk(first, 0, 3, True)
    assert (seq, start, end, samples) == (first, 0, 3, True)


@pytest.mark.parametrize(
    ("num_prompt", "num_generated", "max_tokens", "error"),
    [
        (3, 0, 0, None),
        (3, 2, 3, None),
        (3, 0, 9, None),  # three blocks of four
        (0, 3, 9, InvalidRequestError),
        (-1, 3, 9, InvalidRequestError),
        (3, 0, -1, InvalidRequestError),
        (3, 3, 3, InvalidRequestError),
        (3, 0, 10, CapacityError),
        (3, 0, 16, CapacityError),
        (3, 0, 17, ContextLengthError),
    ],
)
def test_a_sequence_that_can_never_run_is_refused(
    num_prompt: int, num_generated: int, max_tokens: int, error: type[Exception] | None
) -> None:
    token_ids = list(range(num_prompt + num_generated))
    stop = StopConditions(max_tokens=max_tokens)
    seq = Sequence("r", token_ids, num_prompt, SamplingParams(), stop)
    if error is None:
        check_limits(seq, 19, 3, 4, (0,))
    else:
        with pytest.raises(error):
            check_limits(seq, 19, 3, 4, (0,))


@pytest.mark.parametrize(("num_prompt", "to_shorten"), [(18, "max_tokens"), (19, "prompt")])
def test_a_sequence_that_is_too_long_is_told_what_to_shorten(
    num_prompt: int, to_shorten: str
) -> None:
    stop = StopConditions(max_tokens=2)
    seq = Sequence("r", list(range(num_prompt)), num_prompt, SamplingParams(), stop)
    with pytest.raises(ContextLengthError) as raised:
        check_limits(seq, 19, 9, 4, (0,))
    assert raised.value.param == to_shorten
