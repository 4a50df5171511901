"""Profiles of emulated devices: a step's cost by a roofline, the KV pool and the link.

A profile is DEVICE/MODEL of the files in this room, computed by `profile_of`, or a file of its own
with the numbers of `Profile`, such as measured ones.
"""

from pathlib import Path
from typing import TypeVar

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from tandem.engine.schedule.step_cost import StepWork
from tandem.runtime.errors import ConfigError
from tandem.runtime.names import did_you_mean

ROOM = Path(__file__).parent
ELEMENT_BYTES = 2  # of weights, K/V and sums over ranks: bfloat16
WORKSPACE_BYTES = 2e9  # of each device, beside weights and K/V
MAX_FILE_BYTES = 64 * 1024
MAX_LATE_SHARE = 0.05  # of steps' time, beyond which figures are not those of the device

T = TypeVar("T", bound=BaseModel)


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Device(_Figures):
    """One accelerator by its data sheet; a share is the part of a rate that engines reach."""

    memory_bytes: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    memory_share: PositiveFloat
    products_per_s: PositiveFloat  # FLOP/s
    product_share: PositiveFloat
    attention_share: PositiveFloat
    tile_tokens: PositiveInt
    step_s: PositiveFloat
    row_s: PositiveFloat
    peer_bytes_per_s: PositiveFloat  # between the devices of one worker
    peer_share: PositiveFloat
    peer_latency_s: PositiveFloat
    link_bytes_per_s: PositiveFloat  # between workers, for each device
    link_share: PositiveFloat
    link_latency_s: PositiveFloat


class DenseModel(_Figures):
    """A dense decoder by its published configuration, on `num_devices` by tensor parallelism."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    num_devices: PositiveInt = 1

    @property
    def layer_weights(self) -> int:
        """The number of weights in all layers."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """The number of weights from the last layer to logits, and of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * ELEMENT_BYTES


class Profile(_Figures):
    """What an emulated worker takes and holds; its devices count as one."""

    step_s: PositiveFloat  # of any step
    weights_s: PositiveFloat  # reading all weights, once a step
    token_s: PositiveFloat  # the products of one token
    position_s: pydantic.NonNegativeFloat  # attention of a prompt's token, for each position
    context_s: pydantic.NonNegativeFloat  # attention of a decode, for each token of its context
    row_s: pydantic.NonNegativeFloat  # each drawn token
    tile_tokens: PositiveInt = 1  # products are computed for a multiple of these
    kv_bytes_per_token: PositiveInt
    kv_tokens: PositiveInt  # that the pool holds
    link_bytes_per_s: PositiveFloat
    link_latency_s: PositiveFloat
    max_position_embeddings: PositiveInt

    def step_seconds(self, work: StepWork, num_rows: int, num_decodes_computed: int) -> float:
        """Return the seconds of a step that draws `num_rows` tokens.

        The weights are read while products of earlier ones are computed: the longer of the two
        counts. `num_decodes_computed` are the decodes, or the graph's size where one is replayed.
        """
        num_tokens = num_decodes_computed + work.num_prompt_tokens
        if work.num_prompt_tokens:
            num_tokens = -(-num_tokens // self.tile_tokens) * self.tile_tokens
        attention_s = self.position_s * work.prompt_context + self.context_s * work.decode_context
        layers_s = max(self.weights_s, self.token_s * num_tokens)
        return self.step_s + layers_s + attention_s + self.row_s * num_rows


def profile_of(device: Device, model: DenseModel, memory_fraction: float) -> Profile:
    """Return the profile of a model on devices of one kind.

    With n devices, weights W (head included), layers L, hidden size H, query size Q:
      weights_s = 2 W / (n memory rate)          token_s = 2 (W - head) / (n product rate) + sums
      context_s = KV bytes / (n memory rate)     position_s = 4 L Q / (n attention rate)
      step_s    = the device's + 2 L latencies   sums = 2 L H * 2 bytes * 2 (n - 1) / n / peer rate
    A rate is the device's times its share; K/V is what `memory_fraction` leaves beside weights.
    """
    n, num_layers = model.num_devices, model.num_layers
    read_per_s = n * device.memory_bytes_per_s * device.memory_share
    weight_bytes = ELEMENT_BYTES * (model.layer_weights + model.head_weights)
    sum_bytes = 2 * num_layers * model.hidden_size * ELEMENT_BYTES * 2 * (n - 1) / n
    sums_s = sum_bytes / (device.peer_bytes_per_s * device.peer_share)
    product_per_s = n * device.products_per_s * device.product_share
    attention_per_s = n * device.products_per_s * device.attention_share
    embedding_bytes = ELEMENT_BYTES * model.head_weights
    kv_bytes = n * (memory_fraction * device.memory_bytes - WORKSPACE_BYTES)
    kv_bytes -= weight_bytes + embedding_bytes
    if kv_bytes < model.kv_bytes_per_token:
        raise ConfigError(
            f"the weights, {weight_bytes / 1e9:.0f} GB, leave no room for K/V on {n} devices of "
            f"{device.memory_bytes / 1e9:.0f} GB; engine.kv_memory_fraction is {memory_fraction:g}",
            param="engine.emulate",
        )
    return Profile(
        step_s=device.step_s + (2 * num_layers * device.peer_latency_s if n > 1 else 0.0),
        weights_s=weight_bytes / read_per_s,
        token_s=2 * model.layer_weights / product_per_s + sums_s,
        position_s=4 * num_layers * model.num_heads * model.head_dim / attention_per_s,
        context_s=model.kv_bytes_per_token / read_per_s,
        row_s=device.row_s,
        tile_tokens=device.tile_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_tokens=int(kv_bytes // model.kv_bytes_per_token),
        link_bytes_per_s=n * device.link_bytes_per_s * device.link_share,
        link_latency_s=device.link_latency_s,
        max_position_embeddings=model.max_position_embeddings,
    )


def load_profile(name: str, memory_fraction: float) -> Profile:
    """Return a profile by its name, DEVICE/MODEL, or from a file.

    Raise ConfigError naming the file and the key at fault, or the nearest name.
    """
    if name in profile_names():
        device, model = name.split("/")
        return profile_of(
            _read(ROOM / "devices" / f"{device}.yaml", Device),
            _read(ROOM / "models" / f"{model}.yaml", DenseModel),
            memory_fraction,
        )
    path = Path(name).expanduser()
    if path.is_file():
        return _read(path, Profile)
    hint = did_you_mean(name, profile_names())
    raise ConfigError(f"{name!r} is neither a profile nor a file; {hint}", param="engine.emulate")


def profile_names() -> list[str]:
    """Return the names of all pairs of a device and a model."""
    devices, models = (
        sorted(path.stem for path in (ROOM / folder).glob("*.yaml"))
        for folder in ("devices", "models")
    )
    return [f"{device}/{model}" for device in devices for model in models]


def _read(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} bytes")
        return kind.model_validate(yaml.safe_load(data))
    except pydantic.ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg']}", param=key) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
