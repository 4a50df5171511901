"""Builds of every kernel that serving can pick, for chips that are not here, judged by rules.

`python -m tandem.bench.kernels.builds` prints tables and exits with 1 if a rule is broken;
`--output docs/lab/kernel-builds.md` puts them into that page.
"""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path

import msgspec

from tandem.bench.kernels.build_cases import FLOAT32, BuildCase, build_cases
from tandem.bench.kernels.compile import (
    MAX_SHARED_BYTES,
    MAX_WARPS_PER_SM,
    CompiledKernel,
    compiling,
    recording_lookups,
)
from tandem.bench.report.document import with_part
from tandem.bench.report.options import option, parse
from tandem.kernels.dependent_launch import use_dependent_launch
from tandem.kernels.tuned import shape_key
from tandem.worker.kernel_builds import listen_to_builds

MODULE = "tandem.bench.kernels.builds"
ARCHITECTURES = (80, 90, 100)
NUM_PROCESSES = 2  # each holds a core
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "lab" / "kernel-builds.md"
BEGIN, END = "<!-- builds: written by bench/kernels/builds.py -->", "<!-- end of builds -->"

VECTOR_BYTES = 16
WAIT = "griddepcontrol.wait"  # for the previous kernel, in the PTX of a dependent one
METADATA_BYTES = 8  # block tables, lengths and ids are int64
TENSOR_CORE = ("attention.prefill", "attention.prefill_hopper", "attention.decode")
PRODUCTS = ("gate_up_kernel", "down_kernel", "linear_kernel", "qkv_kernel")  # use tensor cores too
WITH_NORM = ("linear_kernel", "qkv_kernel")
# The logits of listed tokens, wherever they stand; one bit per token; those of a token for experts.
NARROW = ("adjust_kernel", "mask_kernel", "route_kernel")
# Any load of these families narrower than an int64 would read the data themselves.
WIDE_LOADS_ONLY = ("layers.kv_store", "layers.norm", "layers.activation", "layers.embedding")


class KernelBuild(msgspec.Struct, frozen=True, kw_only=True):
    """One build of one kernel; registers and spills are per thread."""

    family: str
    shape: str
    config: str
    kernel: str
    arch: int
    target: str
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    num_wgmmas: int  # in the machine code; where there are none, the PTX has none either
    num_wgmma_waits: int
    has_tma: bool
    is_dependent: bool  # may begin while the previous kernel ends
    reads_early: bool  # global memory, before it waits for that kernel
    writes_early: bool
    load_bytes: tuple[int, ...]  # widths of the loads from global memory, each once, ascending

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that can be resident."""
        return self.blocks_per_sm * self.num_warps / MAX_WARPS_PER_SM

    def broken_rules(self) -> list[str]:
        """Return the rules that this build breaks, in words."""
        limit = MAX_SHARED_BYTES[self.arch]
        is_product = self.family in TENSOR_CORE or self.kernel in PRODUCTS
        uses_tensor_cores = is_product and not self.shape.endswith(FLOAT32)
        widest = max(self.load_bytes, default=0)
        narrowest = min(self.load_bytes, default=VECTOR_BYTES)
        rules = {
            "does not wait for the previous kernel": self.is_dependent and self.writes_early,
            f"built for {self.target}": not self.target.startswith(f"sm_{self.arch}"),
            f"spills {self.spill_bytes} bytes a thread": self.spill_bytes > 0,
            f"{self.shared_bytes} bytes of shared memory, limit {limit}": self.shared_bytes > limit,
            "no block fits a multiprocessor": self.blocks_per_sm == 0,
            "no wgmma": self.arch == 90 and uses_tensor_cores and not self.num_wgmmas,
            # ptxas can give up on their overlap, which no other figure shows. A product with a norm
            # does, as it multiplies from registers; with few tokens it waits for memory instead.
            f"{self.num_wgmmas} wgmmas waited for {self.num_wgmma_waits} times": self.num_wgmmas
            < 2 * self.num_wgmma_waits
            and self.kernel not in WITH_NORM,
            f"widest load {widest} bytes": widest < VECTOR_BYTES
            and not self.has_tma
            and self.kernel not in NARROW,
            f"loads of {narrowest} bytes": self.family in WIDE_LOADS_ONLY
            and narrowest < METADATA_BYTES,
        }
        return [rule for rule, is_broken in rules.items() if is_broken]


def read_build(case: BuildCase, config: str, built: CompiledKernel) -> KernelBuild:
    """Return the facts of `built`, which a launch of `case` compiled."""
    target = re.search(r"\.target (\w+)", built.ptx)
    assert target is not None
    code = built.sass() if "wgmma.mma_async" in built.ptx else ""
    early = built.ptx.partition(WAIT)[0]
    return KernelBuild(
        family=case.family,
        shape=case.shape,
        config=config,
        kernel=built.name,
        arch=built.arch,
        target=target[1],
        num_warps=built.num_warps,
        registers=built.registers,
        spill_bytes=built.spill_bytes,
        shared_bytes=built.shared_bytes,
        blocks_per_sm=built.blocks_per_sm,
        num_wgmmas=code.count("HGMMA.") + code.count("QGMMA."),
        num_wgmma_waits=code.count("WARPGROUP.DEPBAR"),
        has_tma="cp.async.bulk.tensor" in built.ptx,
        is_dependent=built.is_dependent,
        reads_early=any(each in early for each in ("ld.global", "cp.async")),
        writes_early=_writes(early),
        load_bytes=tuple(sorted(set(_load_widths(built.ptx)))),
    )


def build(arch: int, case: BuildCase) -> Iterator[KernelBuild]:
    """Yield the builds that `case` launches on `arch`; not where kernels are interpreted."""
    family = importlib.import_module(f"tandem.kernels.{case.family}")
    with compiling(arch) as compiled, recording_lookups(family) as found:
        try:
            case.launch()
        except Exception as error:
            error.add_note(f"while building {case.family} {case.shape} for sm_{arch}")
            raise
    configs = ", ".join(shape_key(**asdict(config)) for _, _, config in found)
    for built in compiled:
        yield read_build(case, case.config or configs, built)


def build_all(
    architectures: Sequence[int] = ARCHITECTURES,
    env: Mapping[str, str] | None = None,
    *,
    sizes: bool = True,
) -> list[KernelBuild]:
    """Return every build for these chips, by processes with the environment `env`.

    Without `sizes`, one of the shapes that differ in numbers alone.
    """
    env = {**(os.environ if env is None else env)}
    env.pop("TRITON_INTERPRET", None)

    def run(share: int) -> list[list[KernelBuild]]:
        command = [sys.executable, "-m", MODULE, "--share", str(share)]
        command += ["--arch", *map(str, architectures), *(() if sizes else ("--no-sizes",))]
        done = subprocess.run(command, env=env, capture_output=True)
        if done.returncode:
            raise RuntimeError(done.stderr.decode()[-4000:])
        return msgspec.json.decode(done.stdout, type=list[list[KernelBuild]])

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        shares = pool.map(run, range(NUM_PROCESSES))
        in_turns = zip_longest(*shares, fillvalue=())
        return [built for turn in in_turns for builds in turn for built in builds]


def _build_share(share: int, architectures: Sequence[int], sizes: bool) -> list[list[KernelBuild]]:
    """Return each NUM_PROCESSES-th case's builds, announced as in a worker that serves."""
    use_dependent_launch(True)
    announced: list[str] = []
    listen_to_builds(announced.append)
    jobs = [(arch, case) for arch in architectures for case in build_cases(arch)]
    if not sizes:
        kinds = {(arch, each.family, re.sub(r"\d+", "", each.shape)): each for arch, each in jobs}
        jobs = [(arch, case) for (arch, _, _), case in kinds.items()]
    builds = [list(build(*job)) for job in islice(jobs, share, None, NUM_PROCESSES)]
    unannounced = {each.kernel for part in builds for each in part}
    unannounced -= {line.partition(" was ")[0] for line in announced}
    if unannounced:
        raise RuntimeError(f"builds of {', '.join(sorted(unannounced))} were not announced")
    return builds


def render(builds: Iterable[KernelBuild]) -> str:
    """Return the builds as tables in Markdown, one per architecture."""
    by_arch: dict[int, list[KernelBuild]] = {}
    for built in builds:
        by_arch.setdefault(built.arch, []).append(built)
    lines = []
    for arch, found in by_arch.items():
        lines += [f"## sm_{arch}", "", f"| {' | '.join(COLUMNS)} |"]
        lines += ["|---|---|---|" + "---:|" * 5 + "---|"]
        lines += [f"| {' | '.join(row)} |" for row in _rows(found)]
        lines += [""]
    return "\n".join(lines)


def with_tables(page: str, builds: Iterable[KernelBuild]) -> str:
    """Return the page with the tables of `builds` between its marks."""
    return with_part(page, BEGIN, END, render(builds))


COLUMNS = (
    "kernel",
    "shapes",
    "configuration",
    "registers",
    "spilled bytes",
    "shared KiB",
    "blocks per SM",
    "occupancy",
    "instructions",
)


def _rows(builds: Iterable[KernelBuild]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table; shapes whose builds look alike share one."""
    shapes: dict[tuple[str, ...], dict[str, None]] = {}
    for built in builds:
        names = {"wgmma": built.num_wgmmas > 0, "TMA": built.has_tma}
        facts = [name for name, is_there in names.items() if is_there]
        if built.load_bytes:
            facts.append(f"{max(built.load_bytes)}-byte loads")
        alike = (
            built.kernel.strip("_").removesuffix("_kernel"),
            built.config,
            str(built.registers),
            str(built.spill_bytes),
            f"{built.shared_bytes / 1024:.1f}",
            str(built.blocks_per_sm),
            f"{built.occupancy:.0%}",
            ", ".join(facts),
        )
        shapes.setdefault(alike, {})[built.shape] = None
    for (kernel, *rest), found in shapes.items():
        yield kernel, "<br>".join(found), *rest


def _writes(ptx: str) -> bool:
    """Return True when the code writes to global memory."""
    return re.search(r"\b(st|red|atom)\.\S*global", ptx) is not None


def _load_widths(ptx: str) -> Iterator[int]:
    """Yield the bytes per thread of each read of global memory, bulk copies left out."""
    for count, bits in re.findall(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[busf](\d+)\b", ptx):
        yield int(count or 1) * int(bits) // 8
    for width in re.findall(
        r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (\w+)", ptx
    ):
        yield int(width, 0)


@dataclass(frozen=True, slots=True)
class Options:
    """Build every kernel for three chips and judge the builds; needs no GPU."""

    output: Path | None = option(None, f"page whose tables are replaced, as {DOCUMENT.name}")
    judge: bool = option(True, "end with 1 when a build breaks a rule")
    share: int | None = option(None, "print this share of the builds as JSON", is_hidden=True)
    arch: tuple[int, ...] = option(ARCHITECTURES, "chips to build for")
    sizes: bool = option(True, "build all shapes, also those that differ in numbers alone")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 when a build breaks a rule."""
    options = parse(Options, MODULE, arguments)
    if options.share is not None:
        sys.stdout.buffer.write(
            msgspec.json.encode(_build_share(options.share, options.arch, options.sizes))
        )
        return 0
    builds = build_all(options.arch, sizes=options.sizes)
    print(render(builds))
    broken = [(built, rule) for built in builds for rule in built.broken_rules()]
    for built, rule in broken:
        print(f"sm_{built.arch} {built.kernel} {built.shape}: {rule}")
    if options.output is not None:
        page = options.output.read_text(encoding="utf-8")
        options.output.write_text(with_tables(page, builds), encoding="utf-8")
    return int(options.judge and bool(broken))


if __name__ == "__main__":
    sys.exit(main())
