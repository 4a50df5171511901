"""The figures of the workers that are simulated: from a file, or from a running worker."""

from pathlib import Path

import msgspec

from tandem.config.live import connected
from tandem.config.model import EffectiveConfig
from tandem.launch.cluster.status import read_cluster
from tandem.launch.simulation.worker import WorkerFigures
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.printable import short
from tandem.runtime.store.discovery import decode_card, models_prefix, readable
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts

# settings of the engine, and our fields
ROOM = ("num_blocks", "block_size", "max_num_seqs", "overlap")
LIMITS = {"max_num_batched_tokens": "max_tokens", "prefill_chunk_tokens": "max_tokens_beside"}


def figures_in(file: Path) -> WorkerFigures:
    """Read a file with `costs`, and optionally the other fields of WorkerFigures.

    Raises ConfigError naming the file and the field.
    """
    try:
        figures = msgspec.json.decode(file.read_bytes(), type=WorkerFigures)
    except OSError as error:
        raise ConfigError(f"--costs {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--costs {file}: {error}") from error
    check_costs(figures.costs, f"--costs {file}")
    return figures


async def figures_of_cluster(effective: EffectiveConfig, model: str = "") -> WorkerFigures:
    """Return the figures of a running worker that has learned its costs.

    Raises ServiceError when there is none, ConfigError for a `model` that no worker serves, and
    without one where the workers serve several.
    """
    report = await read_cluster(effective)
    workers = [each for each in report.instances if each.worker is not None]
    model = _served(model, sorted({each.instance.model for each in workers} - {""}))
    loads = [each.worker.load for each in workers if each.worker and each.instance.model == model]
    learned = [load for load in loads if load.costs is not None and any(load.costs.decode_s)]
    if not learned:
        raise ServiceError(
            f"none of {len(loads)} workers of {model or 'any model'} has learned what its steps "
            "cost: let them answer some requests (tandem bench), or give the costs in a file "
            "(--costs)"
        )
    load = min(learned, key=lambda each: each.instance_id)
    assert load.costs is not None
    check_costs(load.costs, f"worker {load.instance_id[:8]}")
    # Decode workers, which alone learn all costs, may have shorter steps than prefill workers.
    max_tokens = max(each.costs.max_tokens for each in loads if each.costs is not None)
    costs = msgspec.structs.replace(load.costs, max_tokens=max_tokens)
    block_size = await _block_size(effective, load, model)
    is_gpu = costs.tile_tokens > 1
    return WorkerFigures(costs, load.num_blocks, block_size, model=model, overlap=is_gpu)


def _served(model: str, served: list[str]) -> str:
    """Return the model to plan for. Raise ConfigError that names those to choose from."""
    if not model and len(served) <= 1:
        return served[0] if served else ""
    if model not in served:
        wanted = f"--model {short(model)}: no worker serves it" if model else "choose one, --model"
        raise ConfigError(f"{wanted}; served: {', '.join(served) or 'none'}", param="--model")
    return model


async def _block_size(effective: EffectiveConfig, load: LoadReport, model: str) -> int:
    """Return the tokens of a block, from the card of the worker or of another of its model."""
    prefix = models_prefix(effective.config.runtime.namespace, model)
    async with connected(effective) as discovery:
        found = await discovery.get_prefix(prefix)
    cards = readable(found.values(), decode_card)
    if not cards:
        raise ServiceError("no model is registered, so the size of a KV block is not known")
    cards.sort(key=lambda card: card.instance_id != load.instance_id)
    return cards[0].block_size


def check_costs(costs: StepCosts, where: str) -> None:
    """Raise ConfigError naming the field by which steps would take no time."""
    for name in ("decode_s", "prompt_s"):
        if not any(getattr(costs, name)):
            raise ConfigError(f"{where}: costs.{name} is 0: such steps would take no time")
    if costs.max_step_s == 0:
        raise ConfigError(f"{where}: costs.max_step_s must be above 0")


def with_engine_settings(figures: WorkerFigures, effective: EffectiveConfig) -> WorkerFigures:
    """Return the figures with the engine's settings that were given for this plan."""
    given = {
        name: effective.value(f"engine.{name}")
        for name in (*ROOM, *LIMITS, "max_step_ms")
        if effective.origin(f"engine.{name}") != "default"
    }
    given = {name: value for name, value in given.items() if value is not None}
    limits = {LIMITS[name]: value for name, value in given.items() if name in LIMITS}
    if "max_step_ms" in given:
        limits["max_step_s"] = given["max_step_ms"] / 1e3
    room = {name: value for name, value in given.items() if name in ROOM}
    if "max_tokens" in limits:
        room["decode_step_tokens"] = limits["max_tokens"]
    costs = msgspec.structs.replace(figures.costs, **limits)
    return msgspec.structs.replace(figures, costs=costs, **room)
