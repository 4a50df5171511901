"""Digests of slots, draws and the judge, against the same in plain numbers."""

import random

import numpy as np
import pytest

from tandem.bench.stack.judge import true_answer
from tandem.emulation.digests import LAST_SLOTS, Chain, rotating_block

BITS = 2**64 - 1
MULTIPLIER, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
CHOICES = [token_id for token_id in range(300) if token_id != 2]


def mixed(x: int) -> int:
    x = (x ^ x >> 30) * MIX_1 & BITS
    x = (x ^ x >> 27) * MIX_2 & BITS
    return x ^ x >> 31


def plain_slots(tokens: list[int]) -> list[int]:
    slots: list[int] = []
    for position, token in enumerate(tokens):
        before = slots[-1] if slots else 0
        slots.append((MULTIPLIER * before + mixed(token << 32 ^ position)) & BITS)
    return slots


def plain_answer(prompt: list[int], num_tokens: int, seed: int, block_size: int) -> list[int]:
    """An answer token by token, as a sequence without batches, blocks or handoffs draws it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        slots, at = plain_slots(tokens), len(tokens) - 1
        read = [slots[at - i] if at >= i else 0 for i in range(LAST_SLOTS)]
        num_full = at // block_size
        block = [0] * block_size
        if num_full:
            begin = rotating_block(at, block_size) * block_size
            block = slots[begin : begin + block_size]
        read += map(mixed, block)
        fold, weight = 0, 1
        for each in read:
            fold, weight = fold + each * weight, weight * MIX_1
        drawn = mixed(fold & BITS ^ mixed(seed) ^ at)
        tokens.append(CHOICES[drawn % len(CHOICES)])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_prompt", [1, 8, 17, 70])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_judge_knows_every_token_of_an_answer(num_prompt: int, seed: int) -> None:
    prompt = random.Random(num_prompt).choices(range(300), k=num_prompt)
    answer = plain_answer(prompt, 30, seed, 8)
    assert true_answer(prompt + answer, num_prompt, seed, np.array(CHOICES), 8) == answer


def test_chunks_continue_the_chain_wherever_a_sequence_is_cut() -> None:
    tokens = random.Random(5).choices(range(2**31), k=200)
    whole = plain_slots(tokens)
    for cut in (1, 64, 199):
        chain = Chain()
        head = chain.extend(np.zeros(1, np.uint64), np.array(tokens[:cut]), 0)
        tail = chain.extend(head[-1:], np.array(tokens[cut:]), cut)
        assert [*head.tolist(), *tail.tolist()] == whole


@pytest.mark.parametrize("num_full", [1, 2, 17, 1000])
def test_every_full_block_has_its_turn_soon_while_the_context_grows(num_full: int) -> None:
    begin = 16 * num_full
    turns = [rotating_block(position, 16) for position in range(begin, begin + 2 * num_full)]
    assert set(range(num_full)) <= set(turns)
    assert all(0 <= turn < (begin + i) // 16 for i, turn in enumerate(turns))
    assert {rotating_block(position, 16) for position in range(16)} == {-1}


def test_one_wrong_token_of_an_answer_is_wrong_alone_and_everything_after_it_follows_it() -> None:
    prompt = list(range(20))
    answer = plain_answer(prompt, 30, 7, 8)
    answer[10] = 1 if answer[10] != 1 else 3
    judged = true_answer(prompt + answer, 20, 7, np.array(CHOICES), 8)
    assert judged[:10] == answer[:10] and judged[10] != answer[10]
    assert judged[11:] != answer[11:]
