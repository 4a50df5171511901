"""Amounts that API keys share."""

import random

import pytest

from tandem.frontend.access.room import Room


def test_without_keys_all_of_it_can_be_taken() -> None:
    room = Room(10)
    assert room.take(4, "") and room.take(6, "")
    assert not room.take(1, "")
    room.give_back(6, "")
    assert room.take(6, "")


def test_one_key_gets_half_and_a_new_one_finds_room() -> None:
    room = Room(12)
    assert sum(room.take(1, "a") for _ in range(100)) == 6
    assert sum(room.take(1, "b") for _ in range(100)) == 3
    assert room.take(1, "c")


@pytest.mark.parametrize("least", [1, 8])
def test_a_key_gets_its_least_where_there_is_room(least: int) -> None:
    room = Room(8, least)
    assert room.take(least, "a")
    assert room.take(1, "b") == (least == 1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_keys_take_some_is_left_and_the_sums_hold(seed: int) -> None:
    draw = random.Random(seed)
    room, taken = Room(1000), dict.fromkeys("abcdef", 0)
    parts: list[tuple[str, int]] = []
    for _ in range(2000):
        if parts and draw.random() < 0.3:
            key, amount = parts.pop(draw.randrange(len(parts)))
            room.give_back(amount, key)
            taken[key] -= amount
        else:
            key, amount = draw.choice("abcdef"), draw.randint(1, 60)
            if room.take(amount, key):
                parts.append((key, amount))
                taken[key] += amount
                assert taken[key] <= 1000 - sum(taken.values())
        assert room.num_taken == sum(taken.values()) < 1000
    for key, amount in parts:
        room.give_back(amount, key)
    assert room.num_taken == 0 and not room._by_key
