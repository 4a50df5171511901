"""The connector's settings: the environment's, overlaid with `kv_connector_extra_config`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.decode.config import DisaggConfig
from tandem.prefill.config import PrefillConfig
from tandem.queue.config import QueueConfig
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.model_files import weights_fingerprint
from tandem.runtime.names import config_variables, did_you_mean, means_none
from tandem.sdk.worker.cluster import find_cluster
from tandem.transfer.config import TransferConfig
from tandem.vllm.versions import check_version

PROMPTS = "prompts"  # the address of the engine that has prompts computed, set by VllmEngine


class ConnectorConfig(BaseModel):
    """The sections of Tandem's configuration that a rank has."""

    model_config = ConfigDict(frozen=True)

    runtime: RuntimeConfig
    transfer: TransferConfig
    queue: QueueConfig
    disagg: DisaggConfig
    prefill: PrefillConfig


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The settings of one rank."""

    config: ConnectorConfig
    model: str  # as it is served
    weights: str  # tells fine-tunes of a model apart
    kv_form: str  # of how K/V is computed with them
    offers: bool
    takes: bool
    prompts: str  # an address; empty at a decode worker


def connector_settings(vllm_config: Any) -> ConnectorSettings:
    """Return the settings. Raise ConfigError that names a wrong field or variable."""
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    extra = dict(transfer.kv_connector_extra_config)
    prompts = str(extra.pop(PROMPTS, ""))
    takes = bool(transfer.is_kv_producer)
    config = connector_config(extra)
    if takes and not prompts:
        raise ConfigError(
            f"kv_role {transfer.kv_role}: start prefill workers by `tandem engine vllm MODEL "
            "--disaggregation-mode prefill`, which has their prompts computed",
            param="kv_role",
        )
    names = model.served_model_name
    return ConnectorSettings(
        config=config,
        model=names if isinstance(names, str) else names[0],
        weights=_weights(model),
        kv_form=f"vllm {check_version()} {model.dtype} {model.quantization} {model.hf_overrides}",
        offers=bool(transfer.is_kv_consumer),
        takes=takes,
        prompts=prompts,
    )


def connector_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Return the environment's configuration, overlaid with `extra`. Raise ConfigError."""
    values: dict[str, Any] = {name: {} for name in ConnectorConfig.model_fields}
    for key, _, text in config_variables(os.environ, list(values)):
        section, _, field = key.partition(".")
        if section in values:
            values[section][field] = None if means_none(text) else text
    values["runtime"] = find_cluster().model_dump()
    for name, given in extra.items():
        if name not in values:
            raise _wrong(name, f"no such section; {did_you_mean(name, values)}")
        values[name] = values[name] | given if isinstance(given, dict) else given
    try:
        return ConnectorConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise _wrong(".".join(map(str, first["loc"])), first["msg"]) from error


def _weights(model: Any) -> str:
    folder = Path(model.model)
    return weights_fingerprint(folder) if folder.is_dir() else f"{model.model}@{model.revision}"


def _wrong(field: str, reason: str) -> ConfigError:
    name = f"kv_connector_extra_config.{field}"
    return ConfigError(f"{name} (or its environment variable): {reason}", param=name)
