"""The variant of a model that is in force, among workers that serve one name. Pure.

Workers are of one variant when they can stand in for one another: the same files, weights, routes
and kind of input. The variant in force keeps all requests until its last worker is gone.
"""

from collections.abc import Sequence

from tandem.runtime.messages import ModelCard


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


def narrowest(cards: Sequence[ModelCard]) -> ModelCard:
    """Return the card that stands for a variant: the one with the shortest context."""
    return min(cards, key=lambda card: card.context_length)
