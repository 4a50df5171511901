"""From a configuration with a profile's name to the engine's configuration and its runner."""

from tandem.emulation.profile import load_profile
from tandem.emulation.runner import EmulatedRunner
from tandem.engine.config import STEP_TOKENS, EngineConfig
from tandem.engine.memory.kv_cache import TOKENS_PER_BLOCK
from tandem.engine.schedule.step_cost import LONGEST_STEP_MS


def emulated(config: EngineConfig) -> tuple[EngineConfig, EmulatedRunner]:
    """Return the configuration with a GPU's defaults and the profile's pool, and the runner.

    Raise ConfigError or CapacityError when they cannot be built.
    """
    assert config.emulate is not None
    profile = load_profile(config.emulate, config.kv_memory_fraction)
    block_size = config.block_size or TOKENS_PER_BLOCK["VRAM"]
    config = config.with_step_tokens(STEP_TOKENS["VRAM"]).model_copy(
        update={
            "block_size": block_size,
            "num_blocks": config.num_blocks or profile.kv_tokens // block_size,
            "overlap": config.overlap is not False,
            "max_step_ms": config.max_step_ms or LONGEST_STEP_MS["VRAM"],
        }
    )
    return config, EmulatedRunner(config, profile)
