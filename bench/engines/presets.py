"""The engines that can be compared: how each is started, and what its API takes. Pure."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tandem.runtime.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

KV_BYTES = 1 << 30  # of every engine that has an option for it
MAX_MODEL_TOKENS = 2048
PLACEHOLDERS = "{python} {model} {port} {run_dir} {threads} {dtype}"


@dataclass(frozen=True, slots=True)
class Case:
    """The dtype and the threads of a set of rounds."""

    dtype: Dtype
    threads: int

    @property
    def label(self) -> str:
        return f"{self.dtype}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def values(self) -> dict[str, str]:
        return {"dtype": self.dtype, "threads": str(self.threads)}


@dataclass(frozen=True, slots=True)
class Engine:
    """A server: its command and environment, with `PLACEHOLDERS` in them, and its API's limits."""

    name: str
    command: tuple[str, ...]
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    model_name: str = "measured"
    takes_token_ids: bool = True
    takes_ignore_eos: bool = True
    preload: str = ""  # a library of its interpreter's environment
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def command_line(self, values: Mapping[str, str]) -> list[str]:
        """Return the command for these values. Raises ConfigError for an unknown placeholder."""
        return [self._fill(word, values) for word in self.command]

    def environment(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return variables to add to this process's own. Raises ConfigError like the command."""
        found = {name: self._fill(text, values) for name, text in self.env.items()}
        library = Path(self.python).parent.parent / "lib" / self.preload
        return found | ({"LD_PRELOAD": str(library)} if library.is_file() else {})

    def _fill(self, text: str, values: Mapping[str, str]) -> str:
        cpus = sorted(os.sched_getaffinity(0))[-int(values["threads"]) :]
        known = {**values, "python": self.python, "cpus": ",".join(map(str, cpus))}
        try:
            return text.format(**known)
        except (KeyError, IndexError, ValueError) as exc:
            raise ConfigError(
                f"{self.name}: {text!r} has a placeholder that is not one of {PLACEHOLDERS}"
            ) from exc


_TANDEM = Engine(
    "tandem",
    (
        *("{python}", "-m", "tandem.launch", "serve", "{model}", "--topology", "aggregated"),
        *("--port", "{port}", "--run-dir", "{run_dir}/tandem"),
        *("--served-model-name", "measured", "--engine.device=cpu"),
        *("--engine.threads={threads}", "--engine.dtype={dtype}"),
        f"--engine.kv_memory_bytes={KV_BYTES}",
        "--runtime.lease_ttl_s=3600",  # it outlives the others' turns
    ),
)

# It takes text alone and refuses unknown fields; only a whole generation config lets no token
# end an answer.
_TRANSFORMERS = Engine(
    "transformers",
    (
        *("{python}", "-m", "transformers.cli.transformers", "serve", "{model}"),
        *("--host", "127.0.0.1", "--port", "{port}", "--device", "cpu", "--dtype", "{dtype}"),
    ),
    env={"OMP_NUM_THREADS": "{threads}", "HF_HUB_OFFLINE": "1"},
    model_name="{model}",
    takes_token_ids=False,
    takes_ignore_eos=False,
    extra_body={"generation_config": '{"eos_token_id": -1, "pad_token_id": 0, "do_sample": false}'},
)

_VLLM = Engine(
    "vllm",
    (
        *("{python}", "-m", "vllm.entrypoints.cli.main", "serve", "{model}"),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "{dtype}"),
        *("--served-model-name", "measured", "--max-model-len", str(MAX_MODEL_TOKENS)),
    ),
    env={
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",  # --start-timeout-s is the limit
        "HF_HUB_OFFLINE": "1",
    },
    preload="libiomp5.so",  # the OpenMP runtime of its wheel, as its manual asks
)

PRESETS: Mapping[str, Engine] = {each.name: each for each in (_TANDEM, _TRANSFORMERS, _VLLM)}


def make_cases(dtypes: Sequence[str], threads: Sequence[int]) -> list[Case]:
    """Return every dtype with every number of threads. Raises ConfigError for too many threads."""
    num_cpus = len(os.sched_getaffinity(0))
    if over := [count for count in threads if count > num_cpus]:
        raise ConfigError(
            f"{over[0]} threads on {num_cpus} CPUs measure nothing", param="--threads"
        )
    return [Case(dtype, count) for dtype in DTYPES if dtype in dtypes for count in threads]


def make_engines(
    names: Sequence[str], pythons: Sequence[str], commands: Sequence[str]
) -> list[Engine]:
    """Return the engines asked for, in that order: presets by name, others by their `commands`.

    `pythons` and `commands` are NAME=VALUE: an interpreter, a command line with `PLACEHOLDERS`.
    Raises ConfigError naming the word at fault.
    """
    python_of = _by_name(pythons, "--python", names)
    command_of = _by_name(commands, "--command", names)
    if len(set(names)) < len(names):
        raise ConfigError(f"an engine is named twice: {' '.join(names)}", param="--engine")
    engines: list[Engine] = []
    for name in names:
        python = python_of.get(name, sys.executable)
        if name in command_of:
            engines.append(Engine(name, tuple(shlex.split(command_of[name])), python))
        elif name in PRESETS:
            engines.append(replace(PRESETS[name], python=python))
        else:
            raise ConfigError(
                f"{name!r} is not one of {', '.join(PRESETS)}, and has no --command",
                param="--engine",
            )
    return engines


def _by_name(words: Sequence[str], option: str, names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name not in names:
            raise ConfigError(
                f"{option} {word}: expected NAME=VALUE with NAME of {', '.join(names)}",
                param=option,
            )
        found[name] = value
    return found
