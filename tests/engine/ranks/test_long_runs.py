"""Many requests and many steps: the same tokens at every width, whichever rank is late."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.models.random_model import write_random_model
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.engine.ranks.running import config_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Answers = dict[str, list[int]]
DELAY_S = 0.005  # the longest of one rank
PAUSE_S = 0.08  # at least, between delays: a watcher looks at a stopped rank every 50 ms


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", num_heads=4, num_kv_heads=2, num_layers=2)


def request(index: int, max_tokens: int) -> Sequence:
    draw = random.Random(index)
    prompt = [draw.randrange(3, 500) for _ in range(draw.randrange(3, 40))]
    sampling = SamplingParams(temperature=draw.choice((0.0, 0.7, 1.2)), top_p=0.9, seed=index)
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(f"r{index}", prompt, len(prompt), sampling, stop)


def answers_at(
    model: Path, tp: int, num_requests: int, at_once: int, max_tokens: int, late: bool = False
) -> tuple[Answers, int]:
    """Return the tokens of each request, and the number of steps."""
    runner = ModelRunner(config_of(model, tp, threads=1))
    try:
        engine, answers = Engine(runner.config, runner), Answers()
        num_steps = num_open = 0
        waiting = iter(range(num_requests))
        draw = random.Random(0)
        with delays(runner if late else None):
            while True:
                while num_open < at_once and (index := next(waiting, None)) is not None:
                    engine.add(request(index, max_tokens))
                    num_open += 1
                if not engine.has_work:
                    break
                for output in engine.step():
                    answers.setdefault(output.request_id, []).extend(output.token_ids)
                    num_open -= output.finish_reason is not None
                num_steps += 1
                if late and num_steps % 100 == 0:
                    time.sleep(draw.uniform(0, DELAY_S))  # rank 0
        engine.check_invariants()
        return answers, num_steps
    finally:
        runner.close()


@contextmanager
def delays(runner: ModelRunner | None) -> Iterator[None]:
    """Stop one of the other ranks again and again, for a moment."""
    if runner is None:
        yield
        return
    assert runner.followers is not None
    pids, is_over, draw = runner.followers.pids, threading.Event(), random.Random(1)

    def disturb() -> None:
        while not is_over.wait(draw.uniform(PAUSE_S, 2 * PAUSE_S)):
            pid = draw.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0, DELAY_S))
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_thousand_seeded_requests_have_the_same_tokens_at_every_width(model: Path) -> None:
    one, two, four = (answers_at(model, tp, 1000, 16, 8)[0] for tp in (1, 2, 4))
    assert len(one) == 1000 and one == two == four


def test_thousands_of_steps_with_delays_at_every_rank_go_on_and_do_not_differ(
    model: Path,
) -> None:
    found, num_steps = answers_at(model, 4, 53, 4, 256, late=True)
    assert num_steps >= 3_000
    assert found == answers_at(model, 1, 53, 4, 256)[0]
