"""Layers in groups of one size and one window: a block of the KV pool belongs to one group."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

# Each group adds a block table to a sequence, and cuts its blocks smaller.
MAX_GROUPS = 16
# The memory that larger, and so fewer, groups may cost beyond the least.
SLACK = 1.05


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers, those without a window first."""

    windows: tuple[int, ...]  # of each group, in tokens; 0: none
    size: int  # layers that a block has room for
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in a block

    def num_stored(self, num_layers: int) -> list[int]:
        """Return the leading layers of each group's blocks that the first `num_layers` complete.

        A group with room for more layers than it has is complete with the last that it has.
        """
        num_stored = [self.size] * len(self.windows)
        for group, place in reversed(self.places[num_layers:]):
            num_stored[group] = place
        return num_stored


@cache
def group_layers(windows: tuple[int, ...], longest: int) -> LayerGroups:
    """Group layers of these windows so that a sequence of `longest` tokens takes little memory.

    Layers that share a window share groups; without windows there is one group.
    """
    counts = Counter(windows)
    size = _choose_size(counts, longest)
    if size == len(windows) and len(counts) > 1:  # windows that save nothing
        windows, counts = (0,) * size, Counter({0: size})
    groups: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for window in sorted(counts):
        layers = [layer for layer, its in enumerate(windows) if its == window]
        for place, layer in enumerate(layers):
            places[layer] = (len(groups) + place // size, place % size)
        groups += [window] * -(-len(layers) // size)
    return LayerGroups(tuple(groups), size, tuple(places[layer] for layer in range(len(windows))))


def _choose_size(counts: Counter[int], longest: int) -> int:
    """Return the size that makes the fewest groups of those whose memory is near the least."""
    num_layers = counts.total()
    if len(counts) == 1:
        return num_layers
    found = [(num_layers * longest, 1, num_layers)]  # memory, groups, size: one without windows
    for size in range(1, num_layers):
        groups = {window: -(-count // size) for window, count in counts.items()}
        if sum(groups.values()) <= MAX_GROUPS:
            tokens = sum(count * (window or longest) for window, count in groups.items())
            found.append((size * tokens, sum(groups.values()), size))
    most = SLACK * min(found)[0]
    return min((num, memory, size) for memory, num, size in found if memory <= most)[2]
