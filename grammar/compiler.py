"""The grammars of one worker: compiled off the event loop, and kept."""

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from tandem.grammar.compiled import compile_source, load_tokenizer
from tandem.grammar.matcher import GrammarMatcher, MaskThreads
from tandem.grammar.trial import TrialProcess
from tandem.runtime.folder_files import check_file, is_there
from tandem.runtime.messages import Grammar

logger = logging.getLogger(__name__)

MAX_CACHED = 128  # grammars
MAX_CACHED_BYTES = 8 * 2**20  # of their sources; compiled they take some ten times as much

Compiling = asyncio.Task[LLMatcher]


class GrammarCompiler:
    """Makes matchers for one model's vocabulary. `compile` is called on the event loop."""

    def __init__(
        self, tokenizer: LLTokenizer, path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._trial = TrialProcess(path, vocab_size, eos_token_ids)
        self._compiled: OrderedDict[Grammar, Compiling] = OrderedDict()  # the latest used last
        self._thread = ThreadPoolExecutor(1, "tandem-grammar")
        self._mask_threads = MaskThreads()

    @classmethod
    def of_model(
        cls, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> "GrammarCompiler | None":
        """Return the compiler of a model folder. None, logged, without a tokenizer that fits.

        Blocks, and holds the GIL, for up to a second.
        """
        path = folder / "tokenizer.json"
        if not is_there(path) or not eos_token_ids:
            return None
        try:
            check_file(path)
            tokenizer = load_tokenizer(path, vocab_size, eos_token_ids)
        except Exception as error:  # by the file of a stranger; answers without a grammar go on
            logger.warning("answers cannot follow a grammar: %s: %s", path, error)
            return None
        return cls(tokenizer, path, vocab_size, eos_token_ids)

    async def compile(self, grammar: Grammar, answer: list[int]) -> GrammarMatcher:
        """Return a matcher that stands after `answer`, the tokens that were generated elsewhere.

        Raises InvalidRequestError, with the place of the fault, for a grammar that does not compile
        within its limits, and for an answer that does not follow it.
        """
        root = await asyncio.shield(self._root(grammar))
        matcher = GrammarMatcher(root.deep_copy(), grammar, self._vocab_size, self._mask_threads)
        if answer:
            await asyncio.get_running_loop().run_in_executor(self._thread, matcher.replay, answer)
        matcher.begin([])
        return matcher

    async def close(self) -> None:
        """End the process of trials and the threads."""
        for compiling in self._compiled.values():
            compiling.cancel()
        await asyncio.gather(*self._compiled.values(), return_exceptions=True)
        await self._trial.close()
        self._mask_threads.close()
        self._thread.shutdown(wait=False)

    def _root(self, grammar: Grammar) -> Compiling:
        """Return the compilation of a grammar, which all its requests share."""
        compiling = self._compiled.get(grammar)
        if compiling is None:
            compiling = asyncio.create_task(self._compile(grammar))
            compiling.add_done_callback(lambda done: self._forget_failed(grammar, done))
            self._compiled[grammar] = compiling
            self._evict()
        self._compiled.move_to_end(grammar)
        return compiling

    async def _compile(self, grammar: Grammar) -> LLMatcher:
        source = await self._trial.source_of(grammar)
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, compile_source, self._tokenizer, grammar, source
        )

    def _forget_failed(self, grammar: Grammar, done: Compiling) -> None:
        if done.cancelled() or done.exception() is not None:
            self._compiled.pop(grammar, None)

    def _evict(self) -> None:
        """Drop the grammars that were not used for the longest time."""
        num_bytes = sum(len(grammar.source) for grammar in self._compiled)
        while len(self._compiled) > MAX_CACHED or num_bytes > MAX_CACHED_BYTES:
            grammar, _ = self._compiled.popitem(last=False)
            num_bytes -= len(grammar.source)
