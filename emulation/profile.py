"""Profiles of emulated devices: a step's cost by a roofline, the KV pool and the link.

Those in this room, DEVICE/MODEL, are computed by tools/emulation/profiles.py.
"""

from pathlib import Path

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

from tandem.engine.config import DeviceKind
from tandem.engine.schedule.step_cost import StepWork
from tandem.runtime.errors import ConfigError
from tandem.runtime.process.names import did_you_mean

ROOM = Path(__file__).parent
MAX_FILE_BYTES = 64 * 1024
MAX_LATE_SHARE = 0.05  # of steps' time, beyond which figures are not those of the device


class Profile(BaseModel):
    """The times and sizes of an emulated worker, whose devices count as one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device_kind: DeviceKind = "gpu"  # whose defaults the engine has
    step_s: PositiveFloat  # of any step
    weights_s: PositiveFloat  # reading all weights, once a step
    token_s: PositiveFloat  # the products of one token
    position_s: NonNegativeFloat  # attention of a prompt's token, for each position
    context_s: NonNegativeFloat  # attention of a decode, for each token of its context
    row_s: NonNegativeFloat  # each drawn token
    tile_tokens: PositiveInt = 1  # products are computed for a multiple of these
    is_additive: bool = False  # a device that reads no weights while it computes products
    kv_bytes_per_token: PositiveInt
    kv_tokens: PositiveInt  # that the pool holds
    link_bytes_per_s: PositiveFloat
    link_latency_s: PositiveFloat
    max_position_embeddings: PositiveInt

    def num_multiplied(self, work: StepWork, num_decodes_computed: int) -> int:
        """Return the tokens of a step that have products computed: whole tiles with prompts."""
        num_tokens = num_decodes_computed + work.num_prompt_tokens
        if work.num_prompt_tokens:
            num_tokens = -(-num_tokens // self.tile_tokens) * self.tile_tokens
        return num_tokens

    def step_seconds(self, work: StepWork, num_rows: int, num_decodes_computed: int) -> float:
        """Return the seconds of a step that draws `num_rows` tokens.

        The weights are read while products of earlier ones are computed: the longer of the two
        counts, or their sum where `is_additive`. `num_decodes_computed` are the decodes, or the
        graph's size where one is replayed.
        """
        num_tokens = self.num_multiplied(work, num_decodes_computed)
        attention_s = self.position_s * work.prompt_context + self.context_s * work.decode_context
        products_s = self.token_s * num_tokens
        layers_s = max(self.weights_s, products_s)
        if self.is_additive:
            layers_s = self.weights_s + products_s
        return self.step_s + layers_s + attention_s + self.row_s * num_rows


def load_profile(name: str) -> Profile:
    """Return a profile by its name, DEVICE/MODEL, or from a file.

    Raise ConfigError naming the file and the key at fault, or the nearest name.
    """
    path = ROOM / f"{name}.yaml" if name in profile_names() else Path(name).expanduser()
    if not path.is_file():
        hint = did_you_mean(name, profile_names())
        raise ConfigError(f"{name!r} is neither a profile nor a file; {hint}", param="emulate")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} bytes")
        return Profile.model_validate(yaml.safe_load(text))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg']}", param=key) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def profile_names() -> list[str]:
    """Return the names of the profiles in this room."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in ROOM.glob("*/*.yaml"))
