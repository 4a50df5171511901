"""What identifies a model folder."""

from pathlib import Path

import pytest

from tandem.runtime.errors import ModelError
from tandem.runtime.membership.model_files import (
    files_digest,
    read_model_files,
    weights_fingerprint,
)


def write_folder(folder: Path, weights: bytes, tokenizer: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_equal_folders_are_one_model_and_other_weights_are_another(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 400
    first = write_folder(tmp_path / "a", weights)
    same = write_folder(tmp_path / "b", weights)
    tuned = write_folder(tmp_path / "c", weights[:50_000] + b"\1" + weights[50_001:])
    longer = write_folder(tmp_path / "d", weights + b"\0")
    assert weights_fingerprint(first) == weights_fingerprint(same)
    assert len({weights_fingerprint(folder) for folder in (first, tuned, longer)}) == 3


def test_weights_smaller_than_a_sample_are_read_whole(tmp_path: Path) -> None:
    assert weights_fingerprint(write_folder(tmp_path / "a", b"x")) != weights_fingerprint(
        write_folder(tmp_path / "b", b"y")
    )


def test_the_files_digest_follows_the_tokenizer_and_not_the_weights(tmp_path: Path) -> None:
    first, same, other = (
        files_digest(read_model_files(write_folder(tmp_path / name, weights, tokenizer)))
        for name, weights, tokenizer in (("a", b"x", "{}"), ("b", b"y", "{}"), ("c", b"x", "[]"))
    )
    assert first == same != other


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", b"x")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_model_files(folder)
