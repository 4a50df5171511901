"""Groups of layers that share blocks, over the shapes of published models."""

import pytest

from tandem.engine.architecture.layer_groups import group_layers

SHAPES = pytest.mark.parametrize(
    ("windows", "longest", "expected", "size"),
    [
        ([0] * 36, 131_072, (0,), 36),
        ([4096] * 32, 32_768, (4096,), 32),
        ([4096, 0] * 13, 8192, (0, 4096), 13),  # Gemma 2 2B
        ([4096, 0] * 21, 8192, (0, 4096), 21),  # Gemma 2 9B
        ([1024] * 29 + [0] * 5, 131_072, (0,) + (1024,) * 6, 5),  # Gemma 3 4B
        ([128, 0] * 12, 131_072, (0, 128), 12),  # gpt-oss 20B
        ([4096, 4096, 4096, 0] * 8, 65_536, (0, 4096, 4096, 4096), 8),  # OLMo 3 7B
        ([0] * 27 + [512], 32_768, (0,), 28),  # groups of one layer would be too many
    ],
)


@SHAPES
def test_groups_have_one_window_and_one_size(
    windows: list[int], longest: int, expected: tuple[int, ...], size: int
) -> None:
    groups = group_layers(tuple(windows), longest)
    assert (groups.windows, groups.size) == (expected, size)
    assert len(set(groups.places)) == len(windows)
    for window, (group, place) in zip(windows, groups.places, strict=True):
        assert place < size and groups.windows[group] in (window, 0)


@SHAPES
def test_a_layer_is_stored_in_its_group_s_block_once_it_is_computed(
    windows: list[int], longest: int, expected: tuple[int, ...], size: int
) -> None:
    groups = group_layers(tuple(windows), longest)
    for num_layers in range(len(windows) + 1):
        num_stored = groups.num_stored(num_layers)
        stored = [place < num_stored[group] for group, place in groups.places]
        assert stored == [layer < num_layers for layer in range(len(windows))]
    assert num_stored == [size] * len(expected)  # places without a layer among them
