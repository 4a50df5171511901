"""The bench of migrations in small; it finds wrong streams."""

from pathlib import Path

import pytest

from tandem.bench.stack.migration import KILLED_AND_ENDED, NUM_PIECES, Options, strike
from tandem.bench.stack.migration_cluster import MODELS, SampleCluster
from tandem.bench.stack.migration_streams import Stream, StreamMaker

HEAD = {b"content-type": b"text/event-stream"}
SMALL = Options(streams=40, tokens=90, token_interval_ms=25.0)


@pytest.mark.slow
async def test_forty_streams_of_two_models_survive_a_kill_and_an_orderly_end(
    tmp_path: Path,
) -> None:
    async with SampleCluster(tmp_path, SMALL.token_interval_ms) as cluster:
        streams = await strike(cluster, StreamMaker(), SMALL, KILLED_AND_ENDED)
        killed, ended = (cluster.workers[each.worker] for each in KILLED_AND_ENDED)
        assert await killed.wait() == -9
        assert await ended.wait() == 0
    wrong = [stream.description for stream in streams if not stream.is_right]
    assert not wrong
    assert len(streams) == SMALL.streams
    assert {stream.model for stream in streams} == set(MODELS)
    for label in ("killed", "ended"):
        silences_ms = [stream.silence_ms for stream in streams if stream.struck == label]
        assert silences_ms and min(silences_ms) > 0


def read(stream: Stream, text: str, num_tokens: int) -> Stream:
    """An answer with this text, piece by piece, and this many tokens arrives to its end."""
    stream.on_head(200, HEAD | {b"x-tandem-decode-instance": b"one"})
    for piece in text:
        event = '{"choices":[{"text":"' + piece + '","finish_reason":null}]}'
        stream.on_body(f"data: {event}\n\n".encode(), 1.0)
    stream.on_body(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % num_tokens, 2.0)
    stream.on_body(b"data: [DONE]\n\n", 2.0)
    stream.finish()
    return stream


def stream() -> Stream:
    return Stream("alpha", [5, 6], 3, "one two three")


def test_a_stream_is_right_only_with_every_token_once() -> None:
    assert read(stream(), "one two three", 3).is_right
    for text, num_tokens in (
        ("one two two three", 3),
        ("one three", 3),
        ("one two three", 4),
        ("", 3),
    ):
        wrong = read(stream(), text, num_tokens)
        assert not wrong.is_right and "alpha at one" in wrong.description


def test_a_stream_with_an_error_or_without_an_end_is_wrong() -> None:
    broken, refused, cut = stream(), stream(), stream()
    broken.on_head(200, HEAD)
    broken.on_body(b'data: {"error":{"message":"the worker was lost"}}\n\n', 1.0)
    refused.on_head(503, {})
    cut.on_head(200, HEAD)
    for wrong, words in ((broken, "the worker was lost"), (refused, "503"), (cut, "ended without")):
        wrong.finish()
        assert not wrong.is_right and words in wrong.description


def test_the_silence_is_the_longest_one_that_ended_after_the_strike() -> None:
    read_one = stream()
    read_one.record.output_times_s += [0.0, 5.0, 5.5, 7.5, 8.0]
    assert read_one.gap_s(since_s=5.2) == 2.0
    assert read_one.gap_s(since_s=4.0) == 5.0
    assert read_one.gap_s(since_s=9.0) == 0.0


@pytest.mark.parametrize("num_tokens", [1, NUM_PIECES, 300])
def test_the_text_of_a_made_stream_is_that_of_its_tokens(num_tokens: int) -> None:
    made, again = StreamMaker().make("beta", num_tokens), StreamMaker().make("beta", num_tokens)
    assert made.expected_text == again.expected_text and made.prompt == again.prompt
    assert made.expected_text
