"""Sizes of grids and tiles on the host, where Triton's functions take 2 us each, for kernels."""


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of 2 that is not below `count`, which is positive."""
    return 1 << (count - 1).bit_length()
