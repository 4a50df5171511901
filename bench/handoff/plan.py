"""The amounts that a run of the handoff's figures measures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.bench.handoff.end import PoolShape
from tandem.bench.handoff.wire import Pairs, adjacent, in_runs

# 128 KiB per block of 16 tokens, as a model of half a billion parameters has a little more of.
WIRE_SHAPE = PoolShape(num_blocks=512, num_layers=4, num_kv_heads=8, head_dim=32)


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of samples per round; `requests` and `long_requests` go by their prompt's tokens."""

    rounds: int = 5
    num_batches: int = 4  # of writes, in turns between library and agents
    num_writes: int = 3  # of a batch
    num_pings: int = 400
    rest_s: float = 3.0
    requests: Mapping[int, int] = field(
        default_factory=lambda: {256: 20, 1024: 20, 4096: 4, 8192: 2}
    )
    num_warmups: int = 6
    long_tokens: int = 32_768
    long_rounds: int = 2  # of all rounds; a long prompt takes seconds
    shape: PoolShape = WIRE_SHAPE

    def cases(self) -> dict[str, tuple[str, Pairs]]:
        """Return key |-> the blocks of a write, in words and as pairs."""
        whole = self.shape.num_blocks
        return {
            "whole": (f"{whole} blocks, adjacent", adjacent(whole)),
            "runs": (f"{whole} blocks in runs of 16", in_runs(whole, 16)),
            "part": (f"{whole // 8} blocks, adjacent", adjacent(whole // 8)),
        }


QUICK = Plan(
    rounds=1,
    num_batches=1,
    num_writes=3,
    num_pings=50,
    rest_s=0.5,
    requests={256: 3, 1024: 2},
    num_warmups=2,
    long_rounds=0,
    shape=PoolShape(num_blocks=64, num_layers=4, num_kv_heads=2, head_dim=32),
)
