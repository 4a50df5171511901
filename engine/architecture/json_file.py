"""A model's JSON file, read with bounds; its errors name the file and the key."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.runtime.errors import ModelError
from tandem.runtime.membership.folder_files import read_object
from tandem.runtime.printable import short

# Far above any model, and low enough that no size of tensors or tables overflows.
MOST = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 28,
    "original_max_position_embeddings": 1 << 28,
    "sliding_window": 1 << 28,
    "max_window_layers": 1 << 12,
    "no_rope_layer_interval": 1 << 12,
    "sliding_window_pattern": 1 << 12,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "n_routed_experts": 1 << 12,
    "n_shared_experts": 1 << 12,
    "num_experts_per_tok": 1 << 6,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "n_group": 1 << 12,
    "topk_group": 1 << 12,
    "decoder_sparse_step": 1 << 12,
    "first_k_dense_replace": 1 << 12,
}
# Of the base of rotary angles and the like; their roots and products stay within float32.
LEAST_REAL, MOST_REAL = 1e-12, 1e12


def read_json(path: Path) -> "JsonObject":
    """Read the object in the file at `path`. Raise ModelError."""
    return JsonObject(path, read_object(path))


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The object of a file, or one within it."""

    path: Path
    data: dict[str, Any]
    prefix: str = ""  # of its keys in errors

    def part(self, key: str) -> "JsonObject":
        """Return the object at `key`."""
        found = self.data.get(key)
        if not isinstance(found, dict):
            raise self.error(key, "is not a JSON object")
        return replace(self, data=found, prefix=f"{self.prefix}{key}.")

    def empty_part(self, key: str) -> "JsonObject":
        """Return an object without keys in place of the absent one at `key`."""
        return replace(self, data={}, prefix=f"{self.prefix}{key}.")

    def with_defaults(self, defaults: Mapping[str, object]) -> "JsonObject":
        """Return the same object with `defaults` for absent keys. A null stays one."""
        return replace(self, data=dict(defaults) | self.data)

    def with_changes(self, changes: Mapping[str, object]) -> "JsonObject":
        """Return the same object with other values."""
        return replace(self, data=self.data | dict(changes))

    def error(self, key: str, problem: str) -> ModelError:
        """Return an error about the value at `key`."""
        return ModelError(f"{self.path}: {self.prefix}{key}: {problem}", param=key)

    def whole_error(self, problem: str) -> ModelError:
        """Return an error about the object itself, which is a part of the file."""
        name = self.prefix.removesuffix(".")
        return ModelError(f"{self.path}: {name}: {problem}", param=name.rpartition(".")[2])

    def positive(self, key: str, default: int | None = None) -> int:
        """Return a positive integer below its bound. None as default: it must be there."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, f"must be a positive integer, not {value!r}")
        if value > MOST[key]:
            raise self.error(key, f"{value} is above {MOST[key]}, the most that is supported")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number within its bounds. None as default: it must be there."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "missing")
        return self.number_of(key, value)

    def number_of(self, key: str, value: object) -> float:
        """Return `value`, which stands at `key` or in a list there, as a number within bounds."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not LEAST_REAL <= value <= MOST_REAL:  # type: ignore[operator]
            bounds = f"{LEAST_REAL:g} to {MOST_REAL:g}"
            raise self.error(key, f"must be a number from {bounds}, not {short(repr(value))}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str) -> bool:
        """Return a boolean, false where it is absent."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return bool(value)

    def choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """Return the value of `choices` that is named at `key`."""
        name = self.data.get(key)
        name = default if name is None else name
        if not isinstance(name, str) or name not in choices:
            raise self.error(key, f"{name!r} is not supported; supported: {', '.join(choices)}")
        return choices[name]
