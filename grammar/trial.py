"""Trials of grammars in a process of their own, which a bad one may hang, fill or end.

The limits of llguidance do not hold everywhere: a regex can compute for minutes, and a long chain
of rules overflows the stack.
"""

import asyncio
import contextlib
import itertools
import sys
from pathlib import Path

import msgspec

from tandem.grammar.verdict import LENGTH, Order, Verdict, framed
from tandem.runtime.errors import UnavailableError
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.messages import Grammar

START_TIMEOUT_S = 60.0  # of the process, which loads a tokenizer
_SERVER = "tandem.grammar.trial_server"
_decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


class TrialProcess:
    """Tries grammars; started by the first, and again if it has ended."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._command = [sys.executable, "-m", _SERVER, str(tokenizer), str(vocab_size)]
        self._command += [str(token_id) for token_id in eos_token_ids]
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count()
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}

    async def verdict_on(self, grammar: Grammar, limit_s: float) -> Verdict | None:
        """Return the verdict on a grammar; None where it takes over `limit_s`.

        Raises UnavailableError without a process.
        """
        process = await self._started()
        assert process.stdin is not None
        id = next(self._ids)
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._verdicts[id] = verdict
        try:
            process.stdin.write(framed(Order(id, grammar)))
            async with asyncio.timeout(limit_s):
                return await verdict
        except TimeoutError:
            return None
        finally:
            del self._verdicts[id]
            if not verdict.done() or verdict.cancelled():
                process.stdin.write(framed(Order(id)))

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        await cancel(self._reading)
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.stdin.close()
            await process.stdout.read()  # to its end, so that no pipe is left open
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return self._process
            await self.close()
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
            self._process = process
            assert process.stdout is not None
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await process.stdout.readexactly(1)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                await self.close()
                raise _unavailable("did not start") from error
            self._reading = asyncio.create_task(self._read(process.stdout))
            return process

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Hand the verdicts over, until the process ends."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
                verdict = _decode_verdict(await stream.readexactly(length))
                waiting = self._verdicts.get(verdict.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(verdict)
        for waiting in self._verdicts.values():
            if not waiting.done():
                waiting.set_exception(_unavailable("has ended"))


def _unavailable(fate: str) -> UnavailableError:
    return UnavailableError(f"the process that tries grammars {fate}")
