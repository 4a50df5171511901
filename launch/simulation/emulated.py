"""The figures of a simulated worker whose steps take the time of an emulated device."""

from collections.abc import Mapping

from tandem.bench.load.metrics import parse_slos
from tandem.decode.config import DisaggConfig
from tandem.emulation.pool import NUM_LAYERS
from tandem.emulation.profile import Profile
from tandem.engine.config import (
    CHUNK_TOKENS,
    DECODE_STEP_TOKENS,
    STEP_TOKENS,
    TILE_TOKENS,
    EngineConfig,
)
from tandem.engine.memory.kv_blocks import TOKENS_PER_BLOCK
from tandem.engine.schedule.step_cost import longest_step_s
from tandem.launch.simulation.cluster import Setup
from tandem.launch.simulation.worker import HandoffTime, WorkerFigures
from tandem.prefill.config import PrefillConfig
from tandem.router.config import RouterConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.cluster_messages import StepCosts

HANDOFF_S = 0.003  # messages and checks, beside the link's time


def figures_of_profile(profile: Profile) -> WorkerFigures:
    """Return the figures of a worker with default settings on an emulated device.

    Its costs are those that it begins with: the device's, as far as a sum can tell them.
    """
    config, kind = EngineConfig(), profile.device_kind
    floor_s = profile.step_s + profile.weights_s if kind == "gpu" else 0.0
    costs = StepCosts(
        decode_s=(profile.step_s + profile.weights_s, profile.row_s, profile.context_s),
        prompt_s=(profile.step_s, profile.token_s, profile.position_s),
        max_step_s=longest_step_s(config, kind),
        max_tokens=STEP_TOKENS[kind],
        max_tokens_beside=CHUNK_TOKENS[kind],
        hidden_share=0.0 if profile.is_additive else 1.0,
        prompt_floor_s=floor_s,
        tile_tokens=TILE_TOKENS[kind],
    )
    block_size = TOKENS_PER_BLOCK[kind]
    return WorkerFigures(
        costs,
        profile.kv_tokens // block_size,
        block_size,
        config.max_num_seqs,
        decode_step_tokens=DECODE_STEP_TOKENS,
        overlap=kind == "gpu",
    )


def setup_of_profile(profile: Profile, disagg: DisaggConfig, seed: int = 0) -> Setup:
    """Return all of a cluster on emulated devices but its layout and load, by default settings."""
    return Setup(
        figures_of_profile(profile),
        disagg,
        PrefillConfig(),
        RouterConfig(),
        handoff_time_of(profile),
        seed,
        profile,
    )


def handoff_time_of(profile: Profile) -> HandoffTime:
    """Return the time of a handoff over the link of `profile`."""
    per_token_s = profile.kv_bytes_per_token / profile.link_bytes_per_s
    fixed_s = HANDOFF_S + profile.link_latency_s
    return HandoffTime(fixed_s, per_token_s, profile.kv_bytes_per_token, NUM_LAYERS)


def disagg_of(slos: Mapping[str, float]) -> DisaggConfig:
    """Return the config of workers that have limits in ms as their targets."""
    return DisaggConfig(ttft_target_ms=slos["ttft"], itl_target_ms=slos["tpot"])


def both_targets(text: str) -> dict[str, float]:
    """Return the limits in ms of `ttft` and `tpot`. Raises ConfigError without either."""
    slos = parse_slos([text])
    if set(slos) != {"ttft", "tpot"}:
        raise ConfigError("--targets: a ttft and a tpot, as ttft:1000 tpot:20")
    return slos
