"""The choice of the code that computes a model: the engine's own, or that of transformers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tandem.engine.architecture.architectures import ARCHITECTURES, WITH_TEXT_CONFIG
from tandem.engine.architecture.config import ModelConfig, load_model_config
from tandem.engine.architecture.json_file import read_json
from tandem.runtime.errors import ModelError
from tandem.runtime.extras import install_command

ModelImpl = Literal["auto", "native", "transformers"]


def choose_model_config(folder: str | Path, model_impl: ModelImpl) -> ModelConfig:
    """Read the configuration of the model in `folder`, by the code that computes it.

    Raises ModelError for a model that no allowed code computes, naming the reason.
    """
    if model_impl == "native" or (model_impl == "auto" and _has_table(Path(folder))):
        return load_model_config(folder)
    if find_spec("transformers") is None:
        raise ModelError(
            f"{Path(folder) / 'config.json'}: architectures: "
            f"has no native code (which exists for {', '.join(ARCHITECTURES)}); "
            f"to run it by transformers: {install_command('transformers')}",
            param="architectures",
        )
    # Not at the top: the import takes seconds, and transformers is an extra.
    from tandem.engine.transformers_models.generic_build import load_generic_config

    return load_generic_config(folder)


def _has_table(folder: Path) -> bool:
    names = read_json(folder / "config.json").data.get("architectures")
    natives = (*ARCHITECTURES, *WITH_TEXT_CONFIG)
    name = names[0] if isinstance(names, list) and names else None
    # Without the name of a class there is no code to choose, which the native reader reports.
    return not isinstance(name, str) or not name.isidentifier() or name[0] == "_" or name in natives
