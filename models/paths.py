"""Where a model's folder is: the bundled one, a folder on disk, or a download from the hub."""

import importlib.util
import os
import re
from pathlib import Path

from tandem.models import hub
from tandem.runtime.errors import ModelError
from tandem.runtime.extras import install_command
from tandem.runtime.membership.folder_files import is_there

BUNDLED_MODEL_NAME = "tandem-tiny"
BUNDLED_MODEL = Path(__file__).resolve().parent / BUNDLED_MODEL_NAME

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OTHER_WEIGHTS = {
    "*.gguf": "GGUF",
    "pytorch_model*.bin": "PyTorch's pickle",
    "*.pth": "PyTorch's pickle",
}

_INSTEAD = (
    "name the model that they were made from, or an AWQ, GPTQ or FP8 form of it: "
    "a hub id, or a folder with config.json and *.safetensors"
)


def resolve_model(name_or_path: str | Path) -> Path:
    """The folder of a model: a bundled name, a folder with config.json, or a hub id ("owner/name").

    A hub id is downloaded, and blocks meanwhile, when huggingface_hub is installed. Raises
    ModelError that says what was tried.
    """
    name = str(name_or_path)
    if name in ("bundled", BUNDLED_MODEL_NAME):
        return _bundled()
    folder = Path(name).expanduser()
    _refuse_other_weights(folder)
    if folder.is_dir():
        if is_there(folder / "config.json"):
            return folder.resolve()
        raise ModelError(f"{folder} is a folder, but it has no config.json", param="model")
    tried = [f"the bundled name {BUNDLED_MODEL_NAME!r}", f"the folder {folder.absolute()}"]
    if not HUB_ID.fullmatch(name):
        raise _not_found(name, [*tried, "not a hub id, which reads owner/name"])
    if importlib.util.find_spec("huggingface_hub") is None:
        hint = f"the hub was not asked: install huggingface_hub ({install_command('hub')})"
        raise _not_found(name, [*tried, hint])
    return _download(name, tried)


def _refuse_other_weights(path: Path) -> None:
    """Raise ModelError naming format and file where weights are in another than safetensors."""
    if path.is_dir() and any(path.glob("*.safetensors")):
        return
    for pattern, name in _OTHER_WEIGHTS.items():
        files = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        if files:
            raise ModelError(
                f"{files[0]}: weights in {name} are not served; {_INSTEAD}",
                param="model",
            )


def _bundled() -> Path:
    if not (BUNDLED_MODEL / "config.json").is_file():
        raise ModelError(
            f"the bundled model is missing: no config.json in {BUNDLED_MODEL}; "
            f"build it with `python -m tools.tiny_model.train --out {BUNDLED_MODEL}`",
            param="model",
        )
    return BUNDLED_MODEL


def _download(hub_id: str, tried: list[str]) -> Path:
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        folder = hub.download(hub_id, endpoint)
    except Exception as error:  # the hub client documents no common base of what it raises
        where = endpoint or "the Hugging Face hub"
        reason = str(error).strip().split("\n", 1)[0]
        attempt = f"{where} ({type(error).__name__}: {reason})"
        raise _not_found(hub_id, [*tried, attempt]) from error
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{hub_id} has no config.json on the hub, as repositories of GGUF files have none; "
            + _INSTEAD,
            param="model",
        )
    return folder


def _not_found(name: str, tried: list[str]) -> ModelError:
    return ModelError(f"no model {name!r}; tried: {'; '.join(tried)}", param="model")
