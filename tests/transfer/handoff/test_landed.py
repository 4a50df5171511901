import pytest

from tandem.transfer.handoff.landed import (
    Landed,
    SettledNotice,
    decode_landed,
    decode_settled,
    encode_landed,
    encode_settled,
)

LANDED = bytes.fromhex(
    "544e444d 02 01 0300 0123456789abcdef0123456789abcdef 02000000 03000000 02000000 0400 0600"
    "ffffffffffffffffffffffffffffffff 05000000 efcdab8967452301 06000000 ffffffffffffffff"
)
SETTLED = bytes.fromhex(
    "544e444d 02 02 0000 0123456789abcdef0123456789abcdef 02000000 07000000 01000000 0000 0000"
    "73737373737373737373737373737373"
)
ID = bytes.fromhex("0123456789abcdef0123456789abcdef")
BLOCKS = ((5, 0x0123456789ABCDEF), (6, 2**64 - 1))
NOTICE = Landed(
    ID, 2, b"\xff" * 16, prefill_rank=3, sequence_number=3, layers=range(4, 6), blocks=BLOCKS
)


def test_a_landed_notice_has_these_bytes() -> None:
    assert encode_landed(NOTICE) == LANDED
    assert decode_landed(LANDED) == NOTICE
    assert decode_settled(LANDED) is None


def test_a_settled_notice_has_these_bytes() -> None:
    notice = SettledNotice(ID, 2, b"s" * 16, 7, 1)
    assert encode_settled(notice) == SETTLED
    assert decode_settled(SETTLED) == notice
    assert decode_landed(SETTLED) is None


@pytest.mark.parametrize("length", range(0, len(LANDED), 5))
def test_a_cut_notice_is_nothing(length: int) -> None:
    assert decode_landed(LANDED[:length]) is None
    assert decode_settled(SETTLED[: min(length, len(SETTLED) - 1)]) is None


@pytest.mark.parametrize("position", [0, 3, 4, 5, 32, 35])
def test_a_damaged_header_is_nothing(position: int) -> None:
    damaged = bytearray(LANDED)
    damaged[position] ^= 0x40
    assert decode_landed(bytes(damaged)) is None
    assert decode_landed(LANDED + b"\0") is None


@pytest.mark.parametrize("position", [0, 3, 4, 5, 6, 36, 38])
def test_a_settled_notice_that_says_more_than_it_may_is_nothing(position: int) -> None:
    damaged = bytearray(SETTLED)
    damaged[position] ^= 0x40
    assert decode_settled(bytes(damaged)) is None
    assert decode_settled(SETTLED + b"\0") is None


def test_a_notice_without_layers_or_without_blocks_is_nothing() -> None:
    no_layers = LANDED[:36] + bytes.fromhex("0400 0400") + LANDED[40:]
    backwards = LANDED[:36] + bytes.fromhex("0600 0400") + LANDED[40:]
    no_blocks = LANDED[:32] + bytes(4) + LANDED[36:56]
    assert decode_landed(no_layers) is decode_landed(backwards) is decode_landed(no_blocks) is None


def test_a_notice_that_counts_more_blocks_than_it_has_is_nothing() -> None:
    for count in (1, 3, 2**32 - 1):
        counted = LANDED[:32] + count.to_bytes(4, "little") + LANDED[36:]
        assert decode_landed(counted) is None
