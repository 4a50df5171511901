"""Processes with a time limit, and a GPU's clocks and power meanwhile."""

import contextlib
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

GPU_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
    "memory.used",
    "clocks_event_reasons.active",
)
WATCH_INTERVAL_MS = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process; `code` is None when its time was up."""

    code: int | None
    output: bytes
    errors: str

    def lines(self, kind: type[T]) -> list[T]:
        """Return what `print_lines` printed there; a last line that was cut off is left out."""
        lines = self.output.splitlines(keepends=True)
        return [msgspec.json.decode(line, type=kind) for line in lines if line.endswith(b"\n")]


class UnderLoad(msgspec.Struct, frozen=True):
    """A GPU's clocks and power while a section ran, over the moments in which it was busy."""

    sm_mhz: float
    min_sm_mhz: float
    power_w: float
    max_power_w: float
    max_temperature_c: float
    num_readings: int


def run_bounded(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run `command` to its end or for `timeout_s`, then kill its process group."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        return Ended(code, output.read(), errors.read().decode(errors="replace"))


@contextlib.contextmanager
def printing_lines() -> Iterator[Callable[[msgspec.Struct], None]]:
    """Yield a function that prints a value as a JSON line, at once.

    What a library prints meanwhile goes to the errors.
    """
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "wb") as stream:

        def print_line(value: msgspec.Struct) -> None:
            stream.write(msgspec.json.encode(value) + b"\n")
            stream.flush()

        yield print_line


def print_lines(values: Iterable[msgspec.Struct]) -> None:
    """Print JSON lines, each as it comes."""
    with printing_lines() as print_line:
        for value in values:
            print_line(value)


def gpu_state(gpu_id: str) -> dict[str, str]:
    """Return the GPU's clocks and power at this moment; empty without nvidia-smi."""
    command = _query(gpu_id)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.strip().splitlines()[0].split(", ")
    return dict(zip(GPU_FIELDS, values, strict=False))


@contextlib.contextmanager
def watching_gpu(gpu_id: str, found: list[UnderLoad]) -> Iterator[None]:
    """Add the GPU's readings during the body to `found`, where there is nvidia-smi."""
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [*_query(gpu_id), "-lms", str(WATCH_INTERVAL_MS)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            yield
            return
        try:
            yield
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        readings = under_load(log.read().decode(errors="replace"))
        if readings is not None:
            found.append(readings)


def under_load(log: str) -> UnderLoad | None:
    """Return the readings of a log of nvidia-smi in which the GPU was busy; None without any."""
    rows = []
    for line in log.splitlines():
        cells = dict(zip(GPU_FIELDS, line.split(", "), strict=False))
        with contextlib.suppress(KeyError, ValueError):
            rows.append([float(cells[name]) for name in _WATCHED])
    busy = [row for row in rows if row[0] > 0]
    if not busy:
        return None
    _, clocks, power, temperature = zip(*busy, strict=True)
    return UnderLoad(
        statistics.median(clocks),
        min(clocks),
        statistics.median(power),
        max(power),
        max(temperature),
        len(busy),
    )


_WATCHED = ("utilization.gpu", "clocks.sm", "power.draw", "temperature.gpu")


def _query(gpu_id: str) -> list[str]:
    fields = f"--query-gpu={','.join(GPU_FIELDS)}"
    return ["nvidia-smi", f"--id={gpu_id}", fields, "--format=csv,noheader,nounits"]
