"""The grammars of one worker: compiled off the event loop, and kept."""

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from tandem.grammar.compiled import compile_source, grammar_error, load_tokenizer
from tandem.grammar.consuming import Consumer
from tandem.grammar.lane import Lane
from tandem.grammar.matcher import GrammarMatcher, MaskThreads
from tandem.grammar.refusals import Refusals
from tandem.grammar.trial import TrialProcess
from tandem.grammar.verdict import Verdict
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.membership.folder_files import check_file, is_there
from tandem.runtime.native import fault_of
from tandem.runtime.wire.messages import Grammar

logger = logging.getLogger(__name__)

MAX_CACHED = 128  # grammars
MAX_CACHED_BYTES = 8 * 2**20  # of their sources; compiled they take some ten times as much
QUICK_TRIAL_S = 0.1  # nearly all take less; those that do not try again in a lane of their own
TRIAL_TIMEOUT_S = 0.8  # a refusal takes under a second, with all that is around the trial

Compiling = asyncio.Task[LLMatcher]


class GrammarCompiler:
    """Makes matchers for one model's vocabulary. `compile` is called on the event loop."""

    def __init__(
        self, tokenizer: LLTokenizer, path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._trial = TrialProcess(path, vocab_size, eos_token_ids)
        self._quick, self._slow = Lane(256, 128), Lane(8, 4)
        self._refusals = Refusals()
        self._compiled: OrderedDict[Grammar, Compiling] = OrderedDict()  # the latest used last
        self._threads = ThreadPoolExecutor(2, "tandem-grammar")  # one for each lane
        self._replays = ThreadPoolExecutor(1, "tandem-replay")
        self._mask_threads = MaskThreads()
        self._consumer = Consumer(tokenizer)

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
        except BaseException as error:  # by the file of a stranger; other answers go on
            logger.warning("answers cannot follow a grammar: %s: %s", path, fault_of(error))
            return None
        return cls(tokenizer, path, vocab_size, eos_token_ids)

    async def compile(
        self, grammar: Grammar, answer: list[int], caller: str = ""
    ) -> GrammarMatcher:
        """Return a matcher that stands after `answer`, the tokens that were generated elsewhere.

        New grammars of several callers are compiled in turn. Raises InvalidRequestError, with the
        place of the fault, for a grammar that does not compile within its limits, and for an answer
        that does not follow it; OverloadedError where too many grammars wait.
        """
        root = await asyncio.shield(self._root(grammar, caller))
        matcher = GrammarMatcher(
            root.deep_copy(), grammar, self._vocab_size, self._mask_threads, self._consumer
        )
        if answer:
            await asyncio.get_running_loop().run_in_executor(self._replays, matcher.replay, answer)
        matcher.begin([])
        return matcher

    async def close(self) -> None:
        """End the process of trials and the threads."""
        for compiling in self._compiled.values():
            compiling.cancel()
        await asyncio.gather(*self._compiled.values(), return_exceptions=True)
        await self._trial.close()
        self._mask_threads.close()
        self._threads.shutdown(wait=False)
        self._replays.shutdown(wait=False)

    def _root(self, grammar: Grammar, caller: str) -> Compiling:
        """Return the compilation of a grammar, which all its requests share."""
        compiling = self._compiled.get(grammar)
        if compiling is None:
            compiling = asyncio.create_task(self._compile(grammar, caller))
            compiling.add_done_callback(lambda done: self._forget_failed(grammar, done))
            self._compiled[grammar] = compiling
            self._evict()
        self._compiled.move_to_end(grammar)
        return compiling

    async def _compile(self, grammar: Grammar, caller: str) -> LLMatcher:
        """Try a grammar, then compile it here. Raises InvalidRequestError, which is remembered."""
        self._refusals.check(grammar, caller)
        async with self._quick.turn(caller):
            verdict = await self._trial.verdict_on(grammar, QUICK_TRIAL_S)
            if verdict is not None:
                return await self._tried(grammar, caller, verdict)
        async with self._slow.turn(caller):
            verdict = await self._trial.verdict_on(grammar, TRIAL_TIMEOUT_S)
            if verdict is None:
                fault = f"it takes more than {TRIAL_TIMEOUT_S:g} s to compile"
                raise self._refused(grammar, caller, grammar_error(grammar, fault), True)
            return await self._tried(grammar, caller, verdict)

    async def _tried(self, grammar: Grammar, caller: str, verdict: Verdict) -> LLMatcher:
        if verdict.is_broken:
            reason = "it takes more memory or a deeper stack to compile than there is"
            raise self._refused(grammar, caller, grammar_error(grammar, reason), True)
        if verdict.fault:
            error = InvalidRequestError(verdict.fault, param=verdict.field)
            raise self._refused(grammar, caller, error, False)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, compile_source, self._tokenizer, grammar, verdict.source
        )

    def _refused(
        self, grammar: Grammar, caller: str, error: InvalidRequestError, is_costly: bool
    ) -> InvalidRequestError:
        self._refusals.note(grammar, caller, error, is_costly=is_costly)
        return error

    def _forget_failed(self, grammar: Grammar, done: Compiling) -> None:
        if done.cancelled() or done.exception() is not None:
            self._compiled.pop(grammar, None)

    def _evict(self) -> None:
        """Drop the grammars that were not used for the longest time."""
        num_bytes = sum(len(grammar.source) for grammar in self._compiled)
        while len(self._compiled) > MAX_CACHED or num_bytes > MAX_CACHED_BYTES:
            grammar, _ = self._compiled.popitem(last=False)
            num_bytes -= len(grammar.source)
