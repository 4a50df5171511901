"""The parts of a model that its registration reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.models.paths import HUB_ID, resolve_model
from tandem.runtime.errors import ConfigError, ModelError
from tandem.runtime.membership.folder_files import read_object
from tandem.runtime.membership.model_files import read_model_files, weights_fingerprint
from tandem.runtime.wire.messages import ModelFiles

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_HUB_SCHEME = "hf://"


@dataclass(frozen=True, slots=True)
class ReadModel:
    """The parts of a model that can be read at its path."""

    name: str
    context_length: int | None
    vocab_size: int = 0
    files: ModelFiles | None = None
    weights_digest: str = ""


def read_text_model(model_path: str | Path, template: str | Path | None) -> ReadModel:
    """Return the name, and the context length of a local folder. Raise ConfigError."""
    if template is not None:
        raise ConfigError(
            "custom_template_path is for token models: a text model renders its own chats",
            param="custom_template_path",
        )
    name = str(model_path)
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return ReadModel(folder.resolve().name, _number(_read_config(folder), CONTEXT_KEYS))
    is_hub_id = HUB_ID.fullmatch(name.removeprefix(_HUB_SCHEME)) is not None
    return ReadModel(name.removeprefix(_HUB_SCHEME) if is_hub_id else folder.name, None)


def read_token_model(model_path: str | Path, template: str | Path | None) -> ReadModel:
    """Return the parts of a token model that frontends need. Download it from the hub. Blocks.

    Raise ModelError naming a missing or wrong part, ConfigError naming `custom_template_path`.
    """
    name = str(model_path).removeprefix(_HUB_SCHEME)
    if name.lower().endswith(".gguf"):
        raise ModelError(
            f"{model_path} is a GGUF file, whose tokenizer frontends cannot read; "
            "give the folder or hub id of the original model, or serve it as ModelInput.Text",
            param="model_path",
        )
    folder = resolve_model(name)
    config = _read_config(folder)
    vocab_size = _number(config, ("vocab_size",))
    if vocab_size is None:
        raise ModelError(f"{folder / 'config.json'} has no vocab_size", param="model_path")
    files = read_model_files(folder)
    if template is not None:
        files = _with_template(files, Path(template))
    is_folder = Path(name).expanduser().is_dir()
    return ReadModel(
        name=folder.name if is_folder else name,
        context_length=_number(config, CONTEXT_KEYS),
        vocab_size=vocab_size,
        files=files,
        weights_digest=weights_fingerprint(folder),
    )


def _with_template(files: ModelFiles, path: Path) -> ModelFiles:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"custom_template_path: cannot read {path}: {error.strerror}",
            param="custom_template_path",
        ) from error
    return ModelFiles(files.files | {"chat_template.jinja": source})


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / "config.json")
    except ModelError as error:
        raise ModelError(error.message, param="model_path") from error


def _number(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the first of `keys` that is a number, also from `text_config`."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            if type(part.get(key)) is int:
                return int(part[key])
    return None
