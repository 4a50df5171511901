"""Trials of grammars in a process of their own, which a bad one may hang, fill or end.

The limits of llguidance do not hold everywhere: a regex can compute for minutes, and a long chain
of rules overflows the stack. `python -m tandem.grammar.trial` compiles one grammar after another
from its standard input.
"""

import asyncio
import contextlib
import resource
import signal
import struct
import sys
import threading
from pathlib import Path

import msgspec

from tandem.grammar.compiled import grammar_error, load_tokenizer
from tandem.grammar.source import tried_source
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.messages import Grammar

TRIAL_TIMEOUT_S = 0.8  # a refusal takes under a second, with all that is around the trial
LONGEST_TRIAL_S = 5.0  # then the process ends by itself, in case its worker is gone
START_TIMEOUT_S = 60.0  # of the process, which loads a tokenizer
MAX_MEMORY_BYTES = 4 * 2**30
STACK_BYTES = 2 * 2**20  # a quarter of a worker's: what passes here has room to spare there
_LENGTH = struct.Struct("<I")


class Verdict(msgspec.Struct):
    """The result of a trial: the source of llguidance's matcher, or the fault of the grammar."""

    source: str = ""
    fault: str = ""
    field: str = "grammar"  # at fault


_REQUEST = msgspec.msgpack.Decoder(Grammar)
_VERDICT = msgspec.msgpack.Decoder(Verdict)


class TrialProcess:
    """Tries one grammar at a time; started by the first, and again after one that broke it."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._command = [sys.executable, "-m", __name__, str(tokenizer), str(vocab_size)]
        self._command += [str(token_id) for token_id in eos_token_ids]
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    async def source_of(self, grammar: Grammar) -> str:
        """Return the source of llguidance's matcher for a grammar that compiles within limits.

        Raises InvalidRequestError for any other, and UnavailableError without a process.
        """
        async with self._one_at_a_time:
            process = await self._started()
            verdict: Verdict | None = None
            try:
                async with asyncio.timeout(TRIAL_TIMEOUT_S):
                    verdict = await _ask(process, msgspec.msgpack.encode(grammar))
            except TimeoutError:
                reason = f"it takes more than {TRIAL_TIMEOUT_S:g} s to compile"
                raise grammar_error(grammar, reason) from None
            except (OSError, asyncio.IncompleteReadError):
                reason = "it takes more memory or a deeper stack to compile than there is"
                raise grammar_error(grammar, reason) from None
            finally:
                if verdict is None:
                    await self.close()
        if verdict.fault:
            raise InvalidRequestError(verdict.fault, param=verdict.field)
        return verdict.source

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        self._process = process
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                assert process.stdout is not None
                await process.stdout.readexactly(1)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            await self.close()
            raise UnavailableError("the process that tries grammars did not start") from error
        return process


async def _ask(process: asyncio.subprocess.Process, payload: bytes) -> Verdict:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(payload)) + payload)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return _VERDICT.decode(await process.stdout.readexactly(length))


def main() -> None:
    """Answer each grammar on standard input with a Verdict, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the worker
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer_path, vocab_size, *eos_token_ids = sys.argv[1:]
    tokenizer = load_tokenizer(
        Path(tokenizer_path), int(vocab_size), tuple(map(int, eos_token_ids))
    )
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer

    def verdict_on(grammar: Grammar) -> Verdict:
        try:
            return Verdict(tried_source(grammar, tokenizer))
        except InvalidRequestError as error:
            return Verdict(fault=error.message, field=error.param or "grammar")

    def answer_all() -> None:
        answers.write(b"\0")
        answers.flush()
        while length := requests.read(_LENGTH.size):
            grammar = _REQUEST.decode(requests.read(*_LENGTH.unpack(length)))
            signal.setitimer(signal.ITIMER_REAL, LONGEST_TRIAL_S)
            payload = msgspec.msgpack.encode(verdict_on(grammar))
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(_LENGTH.pack(len(payload)) + payload)
            answers.flush()

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer_all, name="tandem-trial")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
