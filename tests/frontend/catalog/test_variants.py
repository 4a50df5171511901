"""The choice among workers that serve one name in different variants."""

import itertools
from typing import Any

import msgspec
import pytest

from tandem.frontend.catalog.variants import (
    agreeing,
    compatibility_key,
    fault_of,
    narrowest,
    variant_in_force,
)
from tandem.runtime.wire.cluster_messages import ModelCard


def card(instance_id: str, weights: str, context_length: int = 128) -> ModelCard:
    return ModelCard("m", context_length, 16, 256, "files", instance_id, 0, weights_digest=weights)


OLD = [card("a", "old"), card("b", "old")]
NEW = [card("c", "new"), card("d", "new", context_length=64), card("e", "new")]


def test_a_new_name_takes_the_variant_of_its_first_card() -> None:
    assert variant_in_force([*OLD, *NEW], None) == OLD
    assert variant_in_force([*NEW, *OLD], None) == NEW


@pytest.mark.parametrize("left", [OLD, OLD[:1]])
def test_the_variant_in_use_stays_while_a_worker_of_it_is_left(left: list[ModelCard]) -> None:
    for cards in itertools.permutations([*left, *NEW]):
        assert set(map(id, variant_in_force(cards, OLD[0]))) == set(map(id, left))


def test_after_its_last_worker_the_variant_with_most_workers_takes_over() -> None:
    third = card("f", "third")
    for cards in itertools.permutations([third, *NEW]):
        assert variant_in_force(cards, OLD[0]) == [each for each in cards if each != third]


def test_workers_of_one_variant_share_files_weights_routes_and_input() -> None:
    def key(**fields: Any) -> tuple[str, ...]:
        return compatibility_key(msgspec.structs.replace(OLD[0], **fields))

    assert key(instance_id="b", created_s=1) == key()
    assert key(model_types=["completions", "chat"]) == key()
    others = [
        key(files_digest="x"),
        key(weights_digest="x"),
        key(model_types=["completions"]),
        key(model_input="text"),
    ]
    assert len({key(), *others}) == 5


def test_the_shortest_context_stands_for_a_variant() -> None:
    assert narrowest(NEW).instance_id == "d"


@pytest.mark.parametrize(
    ("lengths", "present", "agreed"),
    [
        ([8192], None, 8192),
        ([8192, 8192, 1], None, 8192),
        ([8192, 1], 8192, 8192),
        ([8192, 4096], None, 4096),
        ([8192, 4096, 4096], 8192, 4096),
        ([4096], 8192, 4096),
        ([8192, 8192, 2**31 - 1], None, 8192),
    ],
)
def test_one_worker_does_not_narrow_the_context_of_the_others(
    lengths: list[int], present: int | None, agreed: int
) -> None:
    cards = [card(str(index), "same", length) for index, length in enumerate(lengths)]
    in_use = None if present is None else card("x", "same", present)
    for order in itertools.permutations(cards):
        members = agreeing(order, in_use)
        assert narrowest(members).context_length == agreed
        assert {each.instance_id for each in members} == {
            each.instance_id for each in cards if each.context_length >= agreed
        }


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"context_length": 1}, "context_length"),
        ({"context_length": -5}, "context_length"),
        ({"context_length": 2**31}, "context_length"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 10**9}, "block_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"block_size": 0, "model_input": "text"}, "block_size"),
    ],
)
def test_a_card_with_a_number_that_cannot_be_is_at_fault(
    fields: dict[str, Any], named: str
) -> None:
    assert fault_of(OLD[0]) == ""
    assert named in fault_of(msgspec.structs.replace(OLD[0], **fields))


def test_a_text_model_need_not_name_its_context() -> None:
    text = msgspec.structs.replace(OLD[0], model_input="text", context_length=0, vocab_size=0)
    assert fault_of(text) == ""


def test_grammars_are_supported_where_all_workers_support_them() -> None:
    able = [msgspec.structs.replace(each, supports_grammar=True) for each in NEW]
    assert narrowest(able) == able[1]
    for cards in itertools.permutations([able[0], able[1], NEW[2]]):
        found = narrowest(cards)
        assert found.context_length == 64 and not found.supports_grammar
