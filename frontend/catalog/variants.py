"""The variant of a model that is in force, among workers that serve one name. Pure.

A card whose numbers no worker can have is not counted, and of one variant the context that most
workers have is in force, so that a single card does not narrow a model.

Workers are of one variant when they can stand in for one another: the same files, weights, routes
and kind of input. The variant in force keeps all requests until its last worker is gone.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from tandem.runtime.wire.cluster_messages import ModelCard

_MAX_BLOCK_SIZE = 65536
_MAX_TOKENS = 2**31 - 1
_SUPPORTED = ("supports_grammar", "supports_token_rules", "supports_images")


def fault_of(card: ModelCard) -> str:
    """Return the number of a card that cannot be; nothing for a valid card."""
    bounds = {"block_size": (1, _MAX_BLOCK_SIZE)}
    if card.model_input == "tokens":
        # Less than two tokens have no room for a prompt and an answer.
        bounds |= {"context_length": (2, _MAX_TOKENS), "vocab_size": (1, _MAX_TOKENS)}
    for name, (least, most) in bounds.items():
        value = getattr(card, name)
        if not least <= value <= most:
            return f"its {name} is {value}, outside {least} to {most}"
    return ""


def compatibility_key(card: ModelCard) -> tuple[str, ...]:
    """Return a key that is equal for workers of one variant."""
    return (card.model_input, card.files_digest, card.weights_digest, *sorted(card.model_types))


def variant_in_force(cards: Sequence[ModelCard], present: ModelCard | None) -> list[ModelCard]:
    """Return the cards of the variant that gets the requests; `cards` is not empty.

    That is the variant of `present`, the card in use, while a worker of it is left. After that it
    is the variant with the most workers. Of a name without a card in use it is the first card's.
    """
    keys = [compatibility_key(card) for card in cards]
    key = compatibility_key(present) if present is not None else keys[0]
    if key not in keys:
        key = max(set(keys), key=keys.count)
    return [card for card, own in zip(cards, keys, strict=True) if own == key]


def agreeing(cards: Sequence[ModelCard], present: ModelCard | None) -> list[ModelCard]:
    """Return the cards of one variant whose context is not shorter than that of most workers.

    Among contexts of equally many workers it is that of `present`, else the shortest.
    """
    counts = Counter(card.context_length for card in cards)
    most = max(counts.values())
    lengths = [length for length, count in counts.items() if count == most]
    shortest = min(lengths)
    if present is not None and present.context_length in lengths:
        shortest = present.context_length
    return [card for card in cards if card.context_length >= shortest]


def narrowest(cards: Sequence[ModelCard]) -> ModelCard:
    """Return the card that stands for a variant: the one with the shortest context.

    It supports what all of them do.
    """
    card = min(cards, key=lambda card: card.context_length)
    common = {name: all(getattr(each, name) for each in cards) for name in _SUPPORTED}
    if all(getattr(card, name) == is_common for name, is_common in common.items()):
        return card
    return msgspec.structs.replace(card, **common)
