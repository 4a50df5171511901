import socket
from pathlib import Path

import pytest

from tandem.models.paths import BUNDLED_MODEL, BUNDLED_MODEL_NAME, resolve_model
from tandem.runtime.errors import ModelError


def test_the_bundled_name_is_the_bundled_folder() -> None:
    assert resolve_model(BUNDLED_MODEL_NAME) == resolve_model("bundled") == BUNDLED_MODEL


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path.resolve()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_a_config_is_refused_by_the_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "form"),
    [("model-Q4_K_M.gguf", "GGUF"), ("pytorch_model-00001-of-00002.bin", "pickle")],
)
def test_weights_in_another_format_are_refused_by_format_and_file(
    tmp_path: Path, name: str, form: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).touch()
    for model in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError) as caught:
            resolve_model(model)
        message = caught.value.message
        assert form in message and str(tmp_path / name) in message
        assert "name the model that they were made from" in message
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(tmp_path) == tmp_path.resolve()


def test_the_error_of_an_unknown_name_says_what_was_tried() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("no-such-model")
    for attempt in ("'no-such-model'", BUNDLED_MODEL_NAME, "the folder", "owner/name"):
        assert attempt in caught.value.message


def test_the_error_of_an_unreachable_hub_names_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="the hub is an optional extra")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(ModelError) as caught:
            resolve_model("nobody/nothing")
    assert endpoint in caught.value.message
    assert "the folder" in caught.value.message


def test_without_the_hub_library_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'huggingface-hub>="):
        resolve_model("nobody/nothing")
