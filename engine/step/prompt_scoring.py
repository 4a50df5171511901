"""Log probabilities of prompt tokens, from the logits at the positions before them."""

from collections.abc import Callable, Iterator

import torch

from tandem.engine.batch.batch import ScoredChunk
from tandem.engine.batch.upload import download, upload
from tandem.engine.decoder.any_model import AnyModel
from tandem.engine.step.outcome import ScoredPart
from tandem.kernels.sampling.rows import SampledRows, new_sampled_rows
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs

_ALIGNED_ROWS = 16  # parts begin at multiples of it: for an unaligned pointer Triton builds anew


class PromptScorer:
    """Scores the prompts of one model. Logits exist for about `num_rows` tokens at one time."""

    def __init__(self, model: AnyModel, token_logprobs: Callable[..., None], num_rows: int) -> None:
        self._model = model
        self._token_logprobs = token_logprobs
        self._max_rows = -(-num_rows // _ALIGNED_ROWS) * _ALIGNED_ROWS

    def score(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size] of all tokens of the step
        chunks: list[ScoredChunk],
    ) -> "HostScores":
        """Score the tokens of `chunks`. Does not wait for the device."""
        return HostScores(chunks, [self._rows(hidden, chunk) for chunk in chunks])

    def _rows(self, hidden: torch.Tensor, chunk: ScoredChunk) -> SampledRows:
        assert chunk.seq.prompt_scores is not None
        num_rows, num_top = len(chunk.token_ids), chunk.seq.prompt_scores.num_top
        rows = new_sampled_rows(num_rows, num_rows, num_top, hidden.device)
        [token_ids] = upload([chunk.token_ids], hidden.device)
        rows.token_ids.copy_(token_ids)
        for part in self.parts(chunk.row, num_rows):
            logits = self._model.logits(hidden[part.start : part.stop])
            self._token_logprobs(logits, _part(rows, part.start - chunk.row, part.stop - chunk.row))
        return rows

    def parts(self, row: int, num_rows: int) -> Iterator[range]:
        """Yield the rows of each call for logits, for a chunk whose first row is `row`."""
        for start in range(row, row + num_rows, self._max_rows):
            yield range(start, min(row + num_rows, start + self._max_rows))


class HostScores:
    """The scores of a step, copied to the host; valid once the step has happened."""

    def __init__(self, chunks: list[ScoredChunk], rows: list[SampledRows]) -> None:
        self._chunks = chunks
        self._columns = [
            [download(each.logprobs), download(each.top_ids), download(each.top_logprobs)]
            for each in rows
        ]

    def read(self) -> list[ScoredPart]:
        """Return the scores of each chunk."""
        parts = []
        for (seq, start, _, _), (logprobs, ids, values) in zip(
            self._chunks, self._columns, strict=True
        ):
            packed = PromptLogprobs(
                ids.shape[1],
                logprobs.numpy().astype("<f4").tobytes(),
                ids.numpy().astype("<u4").tobytes(),
                values.numpy().astype("<f4").tobytes(),
            )
            parts.append(ScoredPart(seq, start, packed))
        return parts


def _part(rows: SampledRows, start: int, end: int) -> SampledRows:
    return SampledRows(
        rows.token_ids[start:end],
        rows.logprobs[start:end],
        rows.top_ids[start:end],
        rows.top_logprobs[start:end],
    )
