"""The connector's settings: the environment's, overlaid with `kv_connector_extra_config`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

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

PROMPTS = "prompts"  # the socket of the process that has prompts computed, set by VllmEngine
SECTIONS = ("runtime", "transfer", "queue", "disagg", "prefill")

Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The settings of one rank."""

    runtime: RuntimeConfig
    transfer: TransferConfig
    queue: QueueConfig
    disagg: DisaggConfig
    prefill: PrefillConfig
    model: str  # as it is served
    weights: str  # tells fine-tunes of a model apart
    kv_form: str  # of how K/V is computed with them
    offers: bool
    takes: bool
    prompts: str  # a path; empty at a decode worker


def connector_settings(vllm_config: Any) -> ConnectorSettings:
    """Return the settings. Raise ConfigError that names a wrong field or variable."""
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    extra = dict(transfer.kv_connector_extra_config)
    prompts = str(extra.pop(PROMPTS, ""))
    if unknown := sorted(extra.keys() - set(SECTIONS)):
        hint = did_you_mean(unknown[0], SECTIONS)
        raise _wrong(unknown[0], f"no such section; {hint}")
    takes = bool(transfer.is_kv_producer)
    if takes and not prompts:
        raise ConfigError(
            f"kv_role {transfer.kv_role}: start prefill workers by `tandem engine vllm MODEL "
            "--disaggregation-mode prefill`, which has their prompts computed",
            param="kv_role",
        )
    names = model.served_model_name
    runtime = find_cluster().model_dump() | _given(extra, "runtime")
    return ConnectorSettings(
        runtime=_parsed(RuntimeConfig, "runtime", runtime),
        transfer=_section(TransferConfig, "transfer", extra),
        queue=_section(QueueConfig, "queue", extra),
        disagg=_section(DisaggConfig, "disagg", extra),
        prefill=_section(PrefillConfig, "prefill", extra),
        model=names if isinstance(names, str) else names[0],
        weights=_weights(model),
        kv_form=f"vllm {check_version()} {model.dtype} {model.quantization} {model.hf_overrides}",
        offers=bool(transfer.is_kv_consumer),
        takes=takes,
        prompts=prompts,
    )


def _weights(model: Any) -> str:
    folder = Path(model.model)
    return weights_fingerprint(folder) if folder.is_dir() else f"{model.model}@{model.revision}"


def _section(kind: type[Section], name: str, extra: Mapping[str, Any]) -> Section:
    values: dict[str, Any] = {}
    for key, _, text in config_variables(os.environ, SECTIONS):
        section, _, field = key.partition(".")
        if section == name:
            values[field] = None if means_none(text) else text
    return _parsed(kind, name, values | _given(extra, name))


def _given(extra: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = extra.get(name, {})
    if not isinstance(given, dict):
        raise _wrong(name, "not an object of fields")
    return given


def _parsed(kind: type[Section], name: str, values: Mapping[str, Any]) -> Section:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise _wrong(".".join([name, *map(str, first["loc"])]), first["msg"]) from error


def _wrong(field: str, reason: str) -> ConfigError:
    name = f"kv_connector_extra_config.{field}"
    return ConfigError(f"{name} (or its environment variable): {reason}", param=name)
