"""Whatever stands in the place of a model folder's file, the model is refused by its name."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.config import EngineConfig
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.weights.weights import load_weights
from tandem.grammar.compiler import GrammarCompiler
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import ModelError
from tandem.runtime.membership.folder_files import INDEX_NAME
from tandem.runtime.membership.model_files import (
    OPTIONAL,
    REQUIRED,
    read_model_files,
    weights_fingerprint,
)
from tandem.sdk.worker.model_folders import read_token_model
from tests.engine.tiny_models import make_model

WEIGHTS = "model-00001-of-00003.safetensors"
NAMES = (*REQUIRED, *OPTIONAL, INDEX_NAME, WEIGHTS)
opened: list[str] | None = None


def note(event: str, arguments: Any) -> None:
    if event == "open" and opened is not None and isinstance(arguments[0], str | os.PathLike):
        opened.append(os.fspath(arguments[0]))


sys.addaudithook(note)


def read_with_engine(folder: Path) -> None:
    config = choose_model_config(folder, "auto")
    load_weights(folder, config, torch.float32, torch.device("cpu"))


READERS: dict[str, Callable[[Path], object]] = {
    "engine": read_with_engine,
    "frontend's files": read_model_files,
    "fingerprint": weights_fingerprint,
    "authors' kit": lambda folder: read_token_model(folder, None),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder: Path = write_random_model(tmp_path / "model", max_shard_bytes=200_000)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "added_tokens.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def read_all(folder: Path) -> None:
    for read in READERS.values():
        read(folder)
    config = choose_model_config(folder, "auto")
    assert GrammarCompiler.of_model(folder, config.vocab_size, config.eos_token_ids) is not None


@pytest.fixture
def opens() -> Iterator[list[str]]:
    global opened
    opened = []
    yield opened
    opened = None


def test_every_file_that_is_read_is_tried_here(folder: Path, opens: list[str]) -> None:
    read_all(folder)
    names = {Path(path).name for path in opens if Path(path).parent == folder}
    assert names - {path.name for path in folder.glob("*.safetensors")} == set(NAMES) - {WEIGHTS}
    assert WEIGHTS in names


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_out(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)  # sparse


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [fifo, link_out, dangling, device, huge, Path.mkdir])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_regular_file_of_the_folder_is_refused_by_name(
    name: str, put: Callable[[Path], None], folder: Path, opens: list[str]
) -> None:
    (folder / name).unlink()
    put(folder / name)
    num_refused = 0
    for read in READERS.values():
        opens.clear()
        try:
            read(folder)
        except ModelError as error:
            assert str(folder / name) in error.message
            num_refused += 1
        else:
            has_any_size = name == WEIGHTS and put is huge
            assert has_any_size or str(folder / name) not in opens
    assert num_refused


def test_links_within_a_folder_and_into_the_hubs_cache_are_followed(
    folder: Path, tmp_path: Path
) -> None:
    """A snapshot of the hub's cache has links alone, and so had a folder that it filled."""
    store = tmp_path / "hub" / "models--owner--name" / "blobs"
    snapshot = store.parent / "snapshots" / "c0ffee"
    for path in (store, snapshot):
        path.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(store / f"{number}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number}"))
        (elsewhere / path.name).symlink_to(store / f"{number}")
    within = snapshot / "chat_template.jinja"
    within.rename(snapshot / "old.jinja")
    within.symlink_to("old.jinja")
    read_all(snapshot)
    read_all(elsewhere)


@pytest.mark.parametrize(
    "value", [10**30, -1, 1 << 24, True, 1.5, "x", {}, [10**30], list(range(10**6))]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ends_that_are_no_tokens_or_too_many_are_refused(
    name: str, value: object, folder: Path
) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
    with pytest.raises(ModelError, match="eos_token_id") as caught:
        choose_model_config(folder, "auto")
    assert str(path) in caught.value.message and len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "auto") for name in ("__init__", "a.b", "", 7, ["x"], {}, "x" * 10**6)),
        ("__class__", "native"),
        (None, "native"),
        ("__class__", "transformers"),
        (None, "transformers"),
    ],
)
def test_what_names_no_architecture_is_refused(name: object, code: Any, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [name]}))
    with pytest.raises(ModelError, match="architectures"):
        choose_model_config(folder, code)


@pytest.mark.parametrize("end", ["<|endoftext|>", {"content": "<|endoftext|>"}, "Ġw300", "none"])
@pytest.mark.parametrize("has_decoder", [True, False])
def test_ends_are_those_of_all_three_files(end: object, has_decoder: bool, folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"eos_token": end}
    if not has_decoder:
        del config["added_tokens_decoder"]
    path.write_text(json.dumps(config))
    of_config = json.loads((folder / "config.json").read_text())["eos_token_id"]
    of_tokenizer = [] if end == "none" else [300] if end == "Ġw300" else [256]
    found = choose_model_config(folder, "auto").eos_token_ids
    assert found == (of_config, 7, 8, *of_tokenizer)


@pytest.mark.parametrize("kind", ["native", "transformers"])
@pytest.mark.parametrize("excess", [0.0, 0.5])
def test_a_head_that_is_not_the_embeddings_to_which_it_is_tied_is_refused(
    kind: Any, excess: float, tmp_path: Path
) -> None:
    """A training that changed the head alone leaves such files, and any answer would be wrong."""
    make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    head = stored["model.embed_tokens.weight"].clone()
    head[-1, -1] += excess
    save_file(stored | {"lm_head.weight": head}, path, {"format": "pt"})
    config = EngineConfig(
        model=str(tmp_path), model_impl=kind, device="cpu", threads=1, num_blocks=16, block_size=8
    )
    if not excess:
        ModelRunner(config)
        return
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight differs from model\.embed_tok"):
        ModelRunner(config)
