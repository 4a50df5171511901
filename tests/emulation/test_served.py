"""Emulated workers that serve: answers are true wherever their prompts were computed."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tandem.bench.stack.judge import true_answer
from tandem.emulation.link import EmulatedGroup
from tandem.emulation.runner import EmulatedRunner
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.wire.messages import SamplingParams
from tandem.transfer.handoff.landed import Landed, SettledNotice, encode_landed, encode_settled
from tandem.transfer.layout import KvLayout
from tests.decode.prefill_peer import Answer
from tests.emulation.harness import EmulatedEngine, fast_profile
from tests.handoff_peer import BLOCK_SIZE, TRANSFER, fresh_prompt
from tests.handoff_peer import tiny_model as tiny_model
from tests.services import eventually
from tests.worker.pair import Pair

VOCAB_SIZE = 320  # of the tiny model


def emulated(folder: Path, **changes: object) -> dict[str, object]:
    return {"emulate": fast_profile(folder, **changes), "num_blocks": 400}


def choices(pair: Pair) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    ends = pair.one.worker.engine.runner.model_config.eos_token_ids
    return np.array([token_id for token_id in range(VOCAB_SIZE) if token_id not in ends])


async def judged(pair: Pair, prompt: list[int], answer: Answer, seed: int = 0) -> bool:
    text = await answer.whole()
    tokens = prompt + text.token_ids
    true = true_answer(tokens, len(prompt), seed, choices(pair), BLOCK_SIZE)
    return bool(text.token_ids) and true == text.token_ids


async def test_local_and_remote_answers_are_true_as_the_policy_places_them(
    runtime_config: RuntimeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"policy": "threshold", "max_local_prefill_length": 20}
    async with Pair(runtime_config, tiny_model, engine=emulated(tmp_path), **limits) as pair:
        places: Counter[str] = Counter()
        for turn in range(3):
            prompts = [fresh_prompt(length, turn * 8 + length) for length in (3, 19, 40, 90)]
            seeded = SamplingParams(seed=turn + 1)
            answers = [
                await pair.ask((pair.one, pair.two)[i % 2], prompt, num_tokens=30, sampling=seeded)
                for i, prompt in enumerate(prompts)
            ]
            asked = zip(prompts, answers, strict=True)
            verdicts = [judged(pair, prompt, each, turn + 1) for prompt, each in asked]
            assert all(await asyncio.gather(*verdicts))
            places.update(each.report.place for each in answers if each.report is not None)
        assert places["local"] >= 6 and places["remote"] > 0
        await pair.balanced()


async def test_a_flipped_bit_on_the_way_is_caught_and_the_answer_is_true(
    runtime_config: RuntimeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"policy": "threshold", "max_local_prefill_length": 8}
    async with Pair(runtime_config, tiny_model, engine=emulated(tmp_path), **limits) as pair:
        agent = pair.two.worker.group._first
        transfer, num_flipped = agent.transfer, 0

        async def flip(*arguments: object, **named: object) -> bytes:
            nonlocal num_flipped
            pairs, notice = arguments[3], arguments[4]

            def announced(sums: list[int]) -> bytes:
                nonlocal num_flipped
                message = notice(sums)  # type: ignore[operator]
                runner = pair.two.worker.engine.runner
                assert isinstance(runner, EmulatedRunner)
                local, _ = pairs[0]  # type: ignore[index]
                runner.kv_cache.tensor[local].reshape(-1)[0] += 1.0
                num_flipped += 1
                return message

            return await transfer(*arguments[:4], announced, **named)  # type: ignore[arg-type]

        agent.transfer = flip  # type: ignore[method-assign, assignment]
        for seed in range(30):  # a worker may be the first to take its own ticket
            prompt = fresh_prompt(60, seed)
            assert await judged(pair, prompt, await pair.ask(pair.one, prompt, num_tokens=30))
            if num_flipped:
                break
        assert num_flipped
        agent.transfer = transfer  # type: ignore[method-assign]


async def test_what_is_handed_over_takes_the_time_of_the_bytes_that_it_stands_for(
    runtime_config: RuntimeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    engine = emulated(tmp_path, link_bytes_per_s=131_072 * 100)  # a hundred tokens a second
    limits = {"policy": "threshold", "max_local_prefill_length": 8}
    async with Pair(runtime_config, tiny_model, engine=engine, **limits) as pair:
        (link,) = pair.two.worker.group.reports()
        assert link.write_bytes_per_s == 131_072 * 100
        for seed in range(30):  # a worker may be the first to take its own ticket
            prompt, asked_at = fresh_prompt(80, seed), time.perf_counter()
            answer = await pair.ask(pair.one, prompt, num_tokens=4)
            assert await judged(pair, prompt, answer)
            took_s = time.perf_counter() - asked_at
            if answer.report is not None and answer.report.place == "remote":
                break
        assert answer.report is not None and answer.report.place == "remote"
        assert took_s > 0.79


async def test_what_two_senders_write_at_once_shares_the_receiver_s_rate_and_keeps_its_order(
    tmp_path: Path,
) -> None:
    profile = fast_profile(tmp_path, link_bytes_per_s=131_072 * 160)
    runner = EmulatedEngine(profile).runner
    layout = KvLayout.of(runner.kv_cache.tensor, num_kv_heads=1)
    group = EmulatedGroup(runner.profile, TRANSFER, layout, runner.kv_caches, "i", "e")
    landed = encode_landed(Landed(b"h" * 16, 1, b"s" * 16, 0, 0, range(4), ((0, 7),)))
    settled = encode_settled(SettledNotice(b"h" * 16, 1, b"s" * 16, 1, 0))
    came: list[bytes] = []
    began = time.perf_counter()
    for notice in (landed, landed, landed, settled):
        group._arrive(notice, came.append)
    await eventually(lambda: len(came) == 4)
    # the first block may have come while its sender's rate held it; 16 tokens each
    assert time.perf_counter() - began > 0.199
    assert came == [landed, landed, landed, settled]
