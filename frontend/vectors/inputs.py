"""From texts to the tokens of inputs, without holding up the streams."""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.catalog.catalog import TokenModel
from tandem.frontend.generation.prompts import (
    INLINE_CHARACTERS,
    check_characters,
    check_token_ids,
    in_thread,
)
from tandem.frontend.vectors.bodies import Input
from tandem.runtime.errors import ContextLengthError

T = TypeVar("T", tuple[str, str], Input)
_MOST_TEXTS = 64  # that one turn of a thread tokenizes


class VectorInputs(msgspec.Struct, frozen=True):
    """The tokens of each input; of pairs also the place where their second text begins."""

    token_ids: list[list[int]]
    second_starts: list[int] = []
    field: str = "input"  # of the body, that has them

    @property
    def num_tokens(self) -> int:
        """The tokens of all inputs."""
        return sum(map(len, self.token_ids))


async def text_inputs(
    given: list[Input], model: TokenModel, *, with_special: bool = True, name: str = "input"
) -> VectorInputs:
    """Return the tokens of texts, or those that are given. Raises InvalidRequestError.

    `name` is the field of the texts.
    """
    for each in given:
        if isinstance(each, str):
            check_characters(each, model, name)

    def encode(part: list[Input]) -> list[list[int]]:
        return [
            model.text.encode(each, is_chat=not with_special, param=name)
            if isinstance(each, str)
            else each
            for each in part
        ]

    num_characters = sum([len(each) for each in given if isinstance(each, str)])
    if num_characters <= INLINE_CHARACTERS and model.text.is_quick:
        found = encode(given)
    else:
        found = []
        for part in _parts(given):
            found += await in_thread(model, lambda part=part: encode(part))  # type: ignore[misc]
    _check_lengths(found, model, name)
    for each in found:
        check_token_ids(each, model, name)
    return VectorInputs(found, field=name)


async def side_inputs(
    first: list[str], second: list[str], model: TokenModel, names: tuple[str, str]
) -> VectorInputs:
    """Return the tokens of both sides of pairs, text by text. Raises InvalidRequestError."""
    sides = [
        await text_inputs(list(texts), model, name=name)
        for texts, name in zip((first, second), names, strict=True)
    ]
    return VectorInputs([each for side in sides for each in side.token_ids], field=names[1])


async def pair_inputs(
    texts: list[tuple[str, str]], model: TokenModel, names: tuple[str, str]
) -> VectorInputs:
    """Return the tokens of pairs of texts. Raises InvalidRequestError naming a field of `names`."""
    for pair in texts:
        for each, name in zip(pair, names, strict=True):
            check_characters(each, model, name)

    def encode(part: list[tuple[str, str]]) -> list[tuple[list[int], int]]:
        return [model.text.encode_pair(*each) for each in part]

    pairs: list[tuple[list[int], int]] = []
    for part in _parts(texts):
        pairs += await in_thread(model, lambda part=part: encode(part))  # type: ignore[misc]
    token_ids = [ids for ids, _ in pairs]
    _check_lengths(token_ids, model, names[1])
    return VectorInputs(token_ids, [start for _, start in pairs], names[1])


def _parts(items: list[T]) -> Iterator[list[T]]:
    """Yield the items in parts, for one turn of a thread each."""
    part: list[T] = []
    num_characters = 0
    for item in items:
        part.append(item)
        num_characters += sum(map(len, item)) if isinstance(item, tuple) else len(item)
        if len(part) >= _MOST_TEXTS or num_characters >= INLINE_CHARACTERS * _MOST_TEXTS:
            yield part
            part, num_characters = [], 0
    if part:
        yield part


def _check_lengths(token_ids: list[list[int]], model: TokenModel, name: str) -> None:
    """Raise InvalidRequestError for an input without tokens, or with more than fit."""
    most = model.card.context_length
    for index, each in enumerate(token_ids):
        if not each:
            raise invalid_field(f"{name}[{index}]", "has no tokens")
        if len(each) > most:
            raise ContextLengthError(
                f"`{name}[{index}]` has {len(each)} tokens; the model's context is {most} tokens",
                param=f"{name}[{index}]",
            )
