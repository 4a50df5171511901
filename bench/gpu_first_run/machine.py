"""The machine: doctor's findings about it, and what else Triton and CUDA need."""

import hashlib
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton

from tandem.bench.report.figures import Figure, at_least
from tandem.bench.report.setting import Setting
from tandem.engine.architecture.config import load_model_config
from tandem.engine.config import EngineConfig
from tandem.engine.decoder.kernel_set import load_kernels
from tandem.engine.execution.prebuild import META, prebuild
from tandem.engine.weights.weights import empty_weights
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.local.checks_machine import check_machine, check_packages
from tandem.transfer.cuda_context import has_cuda_context
from tandem.worker.kernel_builds import listen_to_builds


def run(setting: Setting) -> Iterator[Figure]:
    """Yield 1 for everything that is as it should be."""
    for found in (*check_machine(), *check_packages()):
        yield _fact(found.subject, found.subject, found.grade == "ok", found.detail, found.remedy)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    is_there = header.exists() and (shutil.which("gcc") or shutil.which("cc")) is not None
    yield _fact("compiler", "gcc and Python.h, for Triton's launchers", is_there, str(header))
    compiler = next(Path(triton.__file__).parent.glob("_C/libtriton*.so"))
    digest = hashlib.sha256(compiler.read_bytes()).hexdigest()
    yield _fact("libtriton", "SHA-256 of libtriton.so", True, triton.__version__, digest)
    if setting.is_dry:
        return
    topology = _output("nvidia-smi", "topo", "-m")
    yield _fact("topology", "nvidia-smi topo -m", True, *topology.splitlines())
    libraries = _output("ldconfig", "-p")
    is_known = all(name in libraries for name in ("libcuda.so.1", "libnvidia-ml.so.1"))
    yield _fact("driver_libraries", "driver's libraries known to ldconfig", is_known)
    links = _output("nvidia-smi", "nvlink", "-s")
    yield _fact("nvlink", "nvidia-smi nvlink -s", True, *links.splitlines())
    unbound = _on_a_thread(has_cuda_context)
    yield _fact("context_of_new_thread", "a new thread has a CUDA context", True, str(unbound))

    def has_context_of_device() -> bool:
        torch.cuda.set_device(setting.device)
        return has_cuda_context()

    bound = _on_a_thread(has_context_of_device)
    yield _fact("context_after_set_device", "it has one after set_device", bound)


def prebuilt(setting: Setting) -> Iterator[Figure]:
    """Yield the seconds in which the bundled model's kernels are built, by the engine's options."""
    if setting.is_dry:
        yield Figure("prebuild", "kernels built", "s", notes=("kernels are interpreted here",))
        return
    variants: tuple[dict[str, bool], ...] = (
        {"deterministic": True},
        {},
        {"deterministic": True, "dependent_launch": True},
    )
    for options in variants:
        lines: list[str] = []
        listen_to_builds(lines.append)
        started = time.perf_counter()
        config = EngineConfig(
            model=str(BUNDLED_MODEL),
            device="cuda:0",
            dtype="bfloat16",
            block_size=64,
            num_blocks=2,
            max_num_batched_tokens=8192,
            max_num_seqs=128,
            kernels="triton",
            deterministic=options.get("deterministic", False),
            dependent_launch=options.get("dependent_launch", False),
        )
        model = replace(load_model_config(BUNDLED_MODEL), dtype="bfloat16")
        longest = model.max_position_embeddings
        weights = empty_weights(model, torch.bfloat16, META)
        prebuild(config, model, weights, load_kernels("triton", **options), longest)
        name = "_".join(["prebuild", *options])
        label = f"{len(lines)} kernels built, {', '.join(options) or 'as by default'}"
        seconds = time.perf_counter() - started
        yield Figure(name, label, "s", (seconds,), notes=tuple(line[:100] for line in lines))
    listen_to_builds(None)


def _fact(name: str, label: str, holds: bool, *notes: str) -> Figure:
    noted = tuple(filter(None, notes))
    return Figure(name, label, "", (float(holds),), at_least(1.0), notes=noted)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def _on_a_thread(look: Callable[[], bool]) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return bool(found and found[0])
