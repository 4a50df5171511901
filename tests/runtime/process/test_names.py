"""Addresses, ids, block hashes and config: the small pure parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.block_hash import block_hashes


def test_an_address_reads_back_what_it_wrote() -> None:
    address = EndpointAddress.parse("tandem.decode.generate")
    assert str(address) == "tandem.decode.generate"
    assert address.instance_key("ab") == "/tandem/tandem/instances/decode/generate/ab"


def test_an_endpoint_with_parts_has_one_key_of_its_own() -> None:
    address = EndpointAddress.parse("tandem://a.b.chat/completions")
    assert str(address) == "a.b.chat/completions"
    assert EndpointAddress.parse(str(address)) == address
    assert address.instance_key("i") == "/tandem/a/instances/b/chat%2Fcompletions/i"


@pytest.mark.parametrize(
    "text", ["", "a.b", "a.b.", "a.b.c.d", "a..c", "a.b/c.d", "a.b. c", "a b.c.d", "a.b./c"]
)
def test_a_bad_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        EndpointAddress.parse(text)


def test_ids_are_sixteen_hex_characters_and_differ() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(bytes.fromhex(id)) == 8 for id in ids)


def test_block_hashes_are_the_same_in_every_release() -> None:
    assert [digest.hex() for digest in block_hashes([1, 2, 3, 4, 5], 2)] == [
        "1eb7361b9623f9b52b8560713ddd5251",
        "a3bff5e6c0c0cadea1b73a2d803c644b",
    ]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(1, 8), st.integers(0, 60))
def test_a_chain_can_be_continued_at_any_block(tokens: list[int], size: int, at: int) -> None:
    whole = block_hashes(tokens, size)
    assert len(whole) == len(tokens) // size
    split = min(at, len(whole))
    parent = whole[split - 1] if split else None
    assert block_hashes(tokens[split * size :], size, parent=parent) == whole[split:]


@given(st.lists(st.integers(0, 9), min_size=4, max_size=12), st.integers(0, 3))
def test_a_changed_token_changes_every_digest_after_it(tokens: list[int], at: int) -> None:
    changed = [token + (i == at) for i, token in enumerate(tokens)]
    before, after = block_hashes(tokens, 1), block_hashes(changed, 1)
    assert before[:at] == after[:at]
    assert not set(before[at:]) & set(after[at:])


def test_tenants_and_adapters_do_not_share_digests() -> None:
    kinds = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc")]
    digests = {block_hashes([1, 2], 2, salt=salt, adapter=adapter)[0] for salt, adapter in kinds}
    assert len(digests) == len(kinds)


def test_a_token_beyond_u32_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_hashes([2**32], 1)


def test_config_refuses_unknown_keys_and_changes() -> None:
    with pytest.raises(ValidationError):
        RuntimeConfig.model_validate({"name_space": "x"})
    with pytest.raises(ValidationError):
        RuntimeConfig().host = "0.0.0.0"


def test_the_cluster_token_is_not_printed() -> None:
    assert "hunter2" not in repr(RuntimeConfig.model_validate({"cluster_token": "hunter2"}))
