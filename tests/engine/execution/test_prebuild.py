"""One process of a machine builds kernels at a time, and none waits for ever."""

import logging
import threading
from pathlib import Path

import pytest
import torch

from tandem.engine.architecture.config import load_model_config
from tandem.engine.execution.prebuild import META, alone_on_this_machine, on_meta
from tandem.engine.weights.weights import empty_weights
from tandem.models.paths import BUNDLED_MODEL


def test_a_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    entered = threading.Event()

    def build() -> None:
        with alone_on_this_machine(tmp_path / "cache"):
            entered.set()

    with alone_on_this_machine(tmp_path / "cache"):
        second = threading.Thread(target=build)
        second.start()
        assert not entered.wait(0.2)
    assert entered.wait(60)
    second.join()


def test_a_builder_that_does_not_end_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with alone_on_this_machine(tmp_path), alone_on_this_machine(tmp_path, patience_s=0):
        assert "not waiting" in caplog.text


def test_a_folder_that_cannot_be_written_to_needs_no_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING), alone_on_this_machine(tmp_path / "file"):
        assert "are not kept" in caplog.text


def test_weights_without_memory_have_the_shapes_and_strides_of_those_with_it() -> None:
    config = load_model_config(BUNDLED_MODEL)
    weights = empty_weights(config, torch.bfloat16, torch.device("cpu"))
    found = on_meta(weights)
    assert found.embedding.device == found.layers[0].qkv.device == META
    assert found.embedding.shape == weights.embedding.shape
    assert (found.lm_head is found.embedding) == (weights.lm_head is weights.embedding)
    assert len(found.layers) == len(weights.layers)
