"""Every kernel once, against its reference implementation, over the shapes that serving can have.

Each kernel has a process of its own, those of attention one per head dim, so that one that hangs
or faults costs no other:
`python -m tandem.bench.gpu_first_run.smoke KERNEL DEVICE PART` prints its figure as JSON.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import msgspec
import torch

from tandem.bench.gpu_first_run.kernel_errors import BY_HEADS, HEADS, KERNELS, Errors, Part
from tandem.bench.report.figures import Figure, at_most
from tandem.bench.report.process import Ended, run_bounded
from tandem.bench.report.sections import MAX_REASON
from tandem.bench.report.setting import Setting, setting_for

MODULE = "tandem.bench.gpu_first_run.smoke"
TIMEOUT_S = 55.0
NUM_PROCESSES = 14
# By what a figure's name adds, in the order of what serving uses most.
PARTS = {
    f"_{others}{HEADS[head][0]}x{HEADS[head][1]}": Part(head=head, is_usual=not others)
    for others in ("", "others_")
    for head in range(len(HEADS))
}


def run(setting: Setting) -> Iterator[Figure]:
    """Yield the largest error of each kernel; of attention's, of each head dim."""
    if setting.is_dry:  # under the interpreter nothing hangs, and a process costs more than all
        for name, kernel in KERNELS.items():
            yield _named(measured(kernel(setting, Part())), f"smoke_{name}")
        return
    yield from _each(_commands(str(setting.device), PARTS), "smoke", TIMEOUT_S)


def run_sanitized(setting: Setting) -> Iterator[Figure]:
    """Run one tiny launch of each kernel under compute-sanitizer's memcheck."""
    tool = shutil.which("compute-sanitizer")
    if setting.is_dry or tool is None:
        yield Figure("sanitize", "compute-sanitizer", "", notes=("it is not here, or no GPU is",))
        return
    check = [tool, "--tool", "memcheck", "--error-exitcode", "9"]
    plain = _commands(str(setting.device), {"": Part(is_tiny=True)})
    commands = {name: [*check, *command] for name, command in plain.items()}
    yield from _each(commands, "sanitize", 3 * TIMEOUT_S)


def _commands(device: str, parts: Mapping[str, Part]) -> dict[str, list[str]]:
    """Return the commands by names of figures: every kernel's first part, then the next."""
    is_tiny = any(part.is_tiny for part in parts.values())
    commands = {
        name: _command(name, device, Part(is_tiny=is_tiny))
        for name in KERNELS
        if name not in BY_HEADS
    }
    for suffix, part in parts.items():
        commands |= {f"{name}{suffix}": _command(name, device, part) for name in BY_HEADS}
    return commands


def _command(kernel: str, device: str, part: Part) -> list[str]:
    return [sys.executable, "-m", MODULE, kernel, device, msgspec.json.encode(part).decode()]


def _each(commands: dict[str, list[str]], section: str, timeout_s: float) -> Iterator[Figure]:
    """Run the commands, some at once; yield the figure of each as it ends."""
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        started = {
            pool.submit(run_bounded, command, timeout_s): name for name, command in commands.items()
        }
        for done in as_completed(started):
            yield _named(_figure_of(done.result(), timeout_s), f"{section}_{started[done]}")


def _figure_of(end: Ended, timeout_s: float) -> Figure:
    if end.code is None:
        return Figure("", "", "", failure=f"took more than {timeout_s:.0f} s")
    if end.code:
        errors = end.errors.strip() or end.output.decode(errors="replace")
        return Figure("", "", "", failure=f"exit {end.code}: {errors[-MAX_REASON:]}")
    return msgspec.json.decode(end.output.splitlines()[-1], type=Figure)


def _named(figure: Figure, name: str) -> Figure:
    return msgspec.structs.replace(figure, name=name, label=name.replace("_", " "))


def measured(errors: Errors) -> Figure:
    """Return the share of its bound that the worst error takes, with the shapes over theirs."""
    found = list(errors)
    worst = max(error / bound for _, error, bound in found)
    wrong = [f"{label}: {error:.3g} over {bound:.3g}" for label, error, bound in found
             if not error <= bound]  # fmt: skip
    failure = f"{len(wrong)} of {len(found)} shapes are wrong: {'; '.join(wrong)[:MAX_REASON]}"
    notes = (f"{len(found)} shapes", *wrong[:20])
    return Figure(
        "", "", "of bound", (worst,), at_most(1.0), notes=notes, failure=failure if wrong else ""
    )


if __name__ == "__main__":
    kernel, device, chosen = sys.argv[1:]
    torch.manual_seed(0)
    part = msgspec.json.decode(chosen, type=Part)
    print(msgspec.json.encode(measured(KERNELS[kernel](setting_for(device), part))).decode())
