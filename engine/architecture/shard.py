"""One rank's share of a model: of heads, of feed-forward layers' widths, and of the vocabulary."""

from dataclasses import dataclass, replace

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.spec import Size, TensorSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of rank `index` of `size` ranks; `whole` is the configuration of the model.

    Where there are fewer KV heads than ranks, ranks that stand side by side share one.
    """

    whole: ModelConfig
    size: int
    index: int

    @property
    def config(self) -> ModelConfig:
        """The configuration of this rank's share, as that of a smaller model."""
        whole = self.whole
        mixture = whole.mixture and replace(
            whole.mixture,
            width=len(self._share("expert_size")),
            shared_width=len(self._share("shared_size")),
        )
        return replace(
            whole,
            mixture=mixture,
            num_heads=len(self._share("num_heads")),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self._share("intermediate_size")),
            vocab_size=len(self._share("vocab_size")),
        )

    @property
    def kv_heads(self) -> range:
        return self._share("num_kv_heads")

    @property
    def vocab_starts(self) -> list[int]:
        """The first token of each rank, and the end of the vocabulary."""
        return [self._start("vocab_size", index) for index in range(self.size + 1)]

    def parts(self, spec: TensorSpec) -> list[tuple[range, range]]:
        """Return this rank's part of a stored tensor: pairs of rows and of their columns.

        Those of stacked matrices are the same in each. A vector has rows, of one column.
        """
        *_, rows, columns = [
            *(self._ranges(name, is_interleaved=spec.is_interleaved) for name in spec.shape),
            *([[range(1)]] if len(spec.shape) == 1 else []),
        ]
        assert len(columns) == 1
        return [(each, columns[0]) for each in rows]

    def _ranges(self, name: Size, *, is_interleaved: bool = False) -> list[range]:
        """Return this rank's part of a dimension: a range of each of the matrices in it."""
        parts: dict[Size, tuple[Size, ...]] = {
            "qkv_size": ("q_size", "kv_size", "kv_size"),
            "gate_up_size": ("intermediate_size", "intermediate_size"),
            "expert_gate_up_size": ("expert_size", "expert_size"),
        }
        if is_interleaved and name == "expert_gate_up_size":
            mine = self._share("expert_size")
            return [range(2 * mine.start, 2 * mine.stop)]
        ranges, first = [], 0
        for part in parts.get(name, (name,)):
            mine = self._share(part)
            ranges.append(range(first + mine.start, first + mine.stop))
            first += getattr(self.whole, part)
        return ranges

    def _share(self, name: Size) -> range:
        """Return this rank's part of a dimension of one matrix."""
        if name in ("num_heads", "num_kv_heads"):
            count: int = getattr(self.whole, name)
            first = self.index * count // self.size
            return range(first, first + max(1, count // self.size))
        if name in ("q_size", "kv_size"):
            heads = self._share("num_heads" if name == "q_size" else "num_kv_heads")
            return range(heads.start * self.whole.head_dim, heads.stop * self.whole.head_dim)
        if name in ("intermediate_size", "expert_size", "shared_size", "vocab_size"):
            return range(self._start(name, self.index), self._start(name, self.index + 1))
        return range(getattr(self.whole, name))

    def _start(self, name: Size, index: int) -> int:
        """Return the first of a rank, where kernels.cpu.segments begins a segment too."""
        count: int = getattr(self.whole, name)
        unit = cut_unit(self.whole, name)
        return count if index == self.size else count // unit * index // self.size * unit


def cut_unit(model: ModelConfig, name: Size) -> int:
    """Return how many of a dimension stay together where it is cut.

    These are a head, the inputs that share a scale, 8 codes, or a pair of bfloat16.
    """
    if name == "q_size":
        return model.head_dim
    if model.quantization is None:
        return 2
    return 8 if name == "vocab_size" else max(8, model.quantization.group_size)
