"""One rank's share of a model: of heads, of a feed-forward layer's width, and of the vocabulary."""

from dataclasses import dataclass, replace

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.spec import Size, TensorSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of rank `index` of `size` ranks; `whole` is the configuration of the model."""

    whole: ModelConfig
    size: int
    index: int

    @property
    def config(self) -> ModelConfig:
        """The configuration of this rank's share, as that of a smaller model."""
        whole = self.whole
        return replace(
            whole,
            num_heads=len(self._heads(whole.num_heads)),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self._range(whole.intermediate_size)),
            vocab_size=len(self._range(whole.vocab_size)),
        )

    @property
    def kv_heads(self) -> range:
        return self._heads(self.whole.num_kv_heads)

    @property
    def vocab_starts(self) -> list[int]:
        """The first token of each rank, and the end of the vocabulary."""
        return [_start(self.whole.vocab_size, index, self.size) for index in range(self.size + 1)]

    def spans(self, spec: TensorSpec) -> tuple[list[range], range | None]:
        """Return this rank's part of a stored tensor: ranges of its rows, one of its columns.

        None: it has no columns.
        """
        assert not spec.is_transposed and not spec.is_interleaved and not spec.is_per_expert
        rows = self._ranges(spec.shape[0])
        if len(spec.shape) == 1:
            return rows, None
        _, name = spec.shape
        [columns] = self._ranges(name)
        return rows, columns

    def _ranges(self, name: Size) -> list[range]:
        """Return this rank's part of a dimension: a range of each of the matrices in it."""
        whole = self.whole
        if name in ("hidden_size", "head_dim"):
            return [range(getattr(whole, name))]
        if name in ("num_heads", "num_kv_heads"):
            return [self._heads(getattr(whole, name))]
        parts: dict[Size, list[int]] = {
            "qkv_size": [whole.q_size, whole.kv_size, whole.kv_size],
            "gate_up_size": [whole.intermediate_size] * 2,
        }
        ranges, first = [], 0
        for part in parts.get(name, [getattr(whole, name)]):
            mine = self._range(part)
            ranges.append(range(first + mine.start, first + mine.stop))
            first += part
        return ranges

    def _range(self, count: int) -> range:
        """Return this rank's part of an even number; a pair of bfloat16 is not parted."""
        starts = (_start(count, index, self.size) for index in (self.index, self.index + 1))
        return range(*starts)

    def _heads(self, count: int) -> range:
        each = count // self.size
        return range(self.index * each, (self.index + 1) * each)


def _start(count: int, index: int, size: int) -> int:
    """Return the first of `count` of a rank, where kernels.cpu.segments begins a segment too."""
    return count if index == size else count // 2 * index // size * 2
