import pytest

from tandem.transfer.landed import (
    Landed,
    SettledNotice,
    decode_landed,
    decode_settled,
    encode_landed,
    encode_settled,
)

LANDED = bytes.fromhex(
    "544e444d 01 01 0000 0123456789abcdef0123456789abcdef 02000000 03000000 04000000 02000000"
    "ffffffffffffffffffffffffffffffff 05000000 efcdab8967452301 06000000 ffffffffffffffff"
)
ID = bytes.fromhex("0123456789abcdef0123456789abcdef")


def test_a_landed_notice_has_these_bytes() -> None:
    blocks = ((5, 0x0123456789ABCDEF), (6, 2**64 - 1))
    assert encode_landed(ID, 2, b"\xff" * 16, 3, 4, blocks) == LANDED
    assert decode_landed(LANDED) == Landed(ID, 2, b"\xff" * 16, 3, 4, blocks)
    assert decode_settled(LANDED) is None


def test_a_settled_notice_survives_the_way() -> None:
    data = encode_settled(ID, 2, b"s" * 16, 7, 1)
    assert len(data) == 56
    assert decode_settled(data) == SettledNotice(ID, 2, b"s" * 16, 7, 1)
    assert decode_landed(data) is None


@pytest.mark.parametrize("length", range(0, len(LANDED), 5))
def test_a_cut_notice_is_nothing(length: int) -> None:
    assert decode_landed(LANDED[:length]) is None


@pytest.mark.parametrize("position", [0, 3, 4, 5, 6, 7, 36, 39])
def test_a_damaged_header_is_nothing(position: int) -> None:
    damaged = bytearray(LANDED)
    damaged[position] ^= 0x40
    assert decode_landed(bytes(damaged)) is None
    assert decode_landed(LANDED + b"\0") is None
