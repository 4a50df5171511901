"""The figures of the workers that are simulated."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.config.model import EffectiveConfig
from tandem.launch.simulation.source import figures_in, figures_of_cluster, with_engine_settings
from tandem.runtime.address import EndpointAddress
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.store.discovery import register_instance, register_model
from tandem.runtime.wire.cluster_messages import (
    LoadReport,
    ModelCard,
    StepCosts,
    WorkerRole,
    WorkerStatus,
)
from tandem.runtime.wire.messages import encode
from tests.config.configs import config_of
from tests.launch.simulation.setups import COSTS, FIGURES


def written(path: Path, **changes: Any) -> Path:
    costs = {**msgspec.to_builtins(COSTS), **changes}
    path.write_bytes(msgspec.json.encode({"costs": costs, "num_blocks": 99, "role": "both"}))
    return path


def test_a_file_takes_the_load_of_tandem_status(tmp_path: Path) -> None:
    figures = figures_in(written(tmp_path / "costs.json"))
    assert figures.costs == COSTS
    assert figures.num_blocks == 99


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decode_s": [0, 0, 0]}, "costs.decode_s is 0"),
        ({"prompt_s": [-1, 0, 0]}, "$.costs.prompt_s[0]"),
        ({"max_step_s": 0}, "costs.max_step_s must be above 0"),
        ({"max_tokens": 0}, "$.costs.max_tokens"),
        ({"max_tokens_beside": 1 << 30}, "$.costs.max_tokens_beside"),
        ({"max_tokens": "many"}, "$.costs.max_tokens"),
    ],
)
def test_impossible_costs_are_refused_by_their_field(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "costs.json", **changes)
    with pytest.raises(ConfigError) as refused:
        figures_in(file)
    assert reason in refused.value.message
    assert str(file) in refused.value.message


def test_engine_settings_of_the_plan_replace_those_of_the_worker() -> None:
    config = config_of(
        "--engine.num_blocks=7", "--engine.max_step_ms=40", "--engine.prefill_chunk_tokens=128"
    )
    figures = with_engine_settings(FIGURES, config)
    assert (figures.num_blocks, figures.block_size) == (7, FIGURES.block_size)
    assert (figures.costs.max_step_s, figures.costs.max_tokens_beside) == (0.04, 128)
    assert figures.costs.max_tokens == COSTS.max_tokens


def test_decode_workers_have_shorter_steps_unless_the_plan_says_how_long() -> None:
    costs = msgspec.structs.replace(COSTS, max_tokens=8192)
    figures = msgspec.structs.replace(FIGURES, costs=costs)
    assert [figures.step_tokens(role) for role in ("both", "prefill", "decode")] == [
        8192,
        8192,
        2048,
    ]
    short = with_engine_settings(figures, config_of("--engine.max_num_batched_tokens=300"))
    assert short.step_tokens("decode") == short.step_tokens("prefill") == 300
    even = with_engine_settings(figures, config_of("--engine.max_num_batched_tokens=8192"))
    assert even.step_tokens("decode") == 8192


async def started(
    stack: contextlib.AsyncExitStack,
    runtime: RuntimeConfig,
    costs: StepCosts | None,
    role: WorkerRole = "both",
    model: str = "m",
    block_size: int = 32,
) -> None:
    """Start a worker that answers with its status, and nothing else, until the stack ends."""
    component = "prefill" if role == "prefill" else "decode"
    node = await stack.enter_async_context(Node(runtime, component=component, model=model))
    instance = node.instance(EndpointAddress(runtime.namespace, component, "generate"))
    load = LoadReport(node.instance_id, node.epoch, role, 0, 0, 0, 77, 77, 0, costs=costs)
    status = encode(WorkerStatus(instance, "serving", load))

    async def tell(payload: bytes, context: RequestContext, answer: Responder) -> None:
        answer.send(status)

    node.server.register("status", tell)
    await register_instance(node, instance)
    card = ModelCard(model, 1000, block_size, 256, "", node.instance_id, 0)
    await register_model(node, runtime.namespace, card)


def of_cluster(runtime: RuntimeConfig) -> EffectiveConfig:
    names = ("namespace", "nats_url", "etcd_endpoints")
    return config_of(*(f"--runtime.{each}={getattr(runtime, each)}" for each in names))


async def test_a_running_worker_gives_its_learned_costs(runtime_config: RuntimeConfig) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await started(stack, runtime_config, COSTS)
        figures = await figures_of_cluster(of_cluster(runtime_config))
        assert (figures.costs, figures.num_blocks, figures.block_size) == (COSTS, 77, 32)


async def test_a_worker_that_has_learned_no_costs_gives_none(runtime_config: RuntimeConfig) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await started(stack, runtime_config, None)
        with pytest.raises(ServiceError, match="none of 1 workers of m has learned"):
            await figures_of_cluster(of_cluster(runtime_config))


async def test_the_steps_of_a_cluster_are_as_long_as_those_of_its_prefill_workers(
    runtime_config: RuntimeConfig,
) -> None:
    """A prefill worker learns no cost of decodes, so the figures are a decode worker's."""
    of_prefill = msgspec.structs.replace(COSTS, decode_s=(0.0, 0.0, 0.0), max_tokens=8192)
    async with contextlib.AsyncExitStack() as stack:
        await started(stack, runtime_config, COSTS, "decode")
        await started(stack, runtime_config, of_prefill, "prefill")
        figures = await figures_of_cluster(of_cluster(runtime_config))
    assert figures.costs == msgspec.structs.replace(COSTS, max_tokens=8192)
    assert figures.step_tokens("prefill") == 8192


async def test_the_costs_of_two_models_are_not_mixed_up(runtime_config: RuntimeConfig) -> None:
    other = msgspec.structs.replace(COSTS, max_step_s=0.5, tile_tokens=128)  # a GPU's
    models = (("a/b", COSTS, 16), ("c", other, 32))
    async with contextlib.AsyncExitStack() as stack:
        for model, costs, block_size in models:
            await started(stack, runtime_config, costs, model=model, block_size=block_size)
        config = of_cluster(runtime_config)
        for model, costs, block_size in models:
            figures = await figures_of_cluster(config, model)
            assert (figures.model, figures.costs) == (model, costs)
            assert figures.block_size == block_size
            assert figures.overlap == (model == "c")
        with pytest.raises(ConfigError, match="choose one, --model; served: a/b, c"):
            await figures_of_cluster(config)
        with pytest.raises(ConfigError, match="--model d: no worker serves it; served: a/b, c"):
            await figures_of_cluster(config, "d")
