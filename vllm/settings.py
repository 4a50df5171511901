"""The connector's settings: the environment's, overlaid with `kv_connector_extra_config`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.decode.config import DisaggConfig
from tandem.prefill.config import PrefillConfig
from tandem.queue.config import QueueConfig
from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.membership.model_files import weights_fingerprint
from tandem.runtime.process.names import config_variables, did_you_mean, means_none
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
    engine: str  # 14 hexadecimal characters, the same in all ranks
    max_prompt_tokens: int  # that this engine computes
    rank: int = 0

    @property
    def instance_id(self) -> str:
        return member_id(self.engine, self.rank)


def member_id(engine: str, rank: int) -> str:
    """Return the instance id of an engine's rank."""
    return f"{engine}{rank:02x}"


def engine_of(instance_id: str) -> str:
    return instance_id[:-2]


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
    rank, num_ranks = vllm_config.parallel_config.rank, vllm_config.parallel_config.world_size
    kv_form = f"vllm {check_version()} {model.dtype} {model.quantization} {model.hf_overrides}"
    if num_ranks > 1:  # each rank pairs with its counterpart in an engine of the same width
        kv_form += f" rank {rank} of {num_ranks}"
        engine = blake2b(transfer.engine_id.encode(), digest_size=7).hexdigest()
    else:
        engine = new_id()[:14]
    return ConnectorSettings(
        config=config,
        model=names if isinstance(names, str) else names[0],
        weights=_weights(model),
        kv_form=kv_form,
        offers=bool(transfer.is_kv_consumer),
        takes=takes,
        prompts=prompts,
        engine=engine,
        max_prompt_tokens=model.max_model_len - 1,  # vLLM generates one token at least
        rank=rank,
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
