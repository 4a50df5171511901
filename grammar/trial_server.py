"""The process of trials: `python -m tandem.grammar.trial_server` TOKENIZER VOCAB_SIZE EOS...

It loads the tokenizer once and forks for each grammar, which takes milliseconds, so that one which
breaks its process or is ended costs no new start. Its worker sends orders, and says when to end a
trial; verdicts go out as they come.
"""

import contextlib
import os
import resource
import selectors
import signal
import sys
import threading
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from tandem.grammar.compiled import load_tokenizer
from tandem.grammar.source import tried_source
from tandem.grammar.verdict import LENGTH, Order, Verdict, framed
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Grammar

LONGEST_TRIAL_S = 5.0  # then a trial ends by itself, in case its worker is gone
MAX_MEMORY_BYTES = 4 * 2**30
STACK_BYTES = 2 * 2**20  # a quarter of a worker's: what passes here has room to spare there
_READ_BYTES = 64 * 1024
_decode_order = msgspec.msgpack.Decoder(Order).decode


class Trials:
    """The trials under way, each in a process of its own."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._selector = selectors.DefaultSelector()
        self._orders = bytearray()
        self._pids: dict[int, int] = {}  # by the id of the trial
        self._answers: dict[int, bytearray] = {}  # likewise

    def serve(self) -> None:
        """Carry out the orders on standard input until it ends."""
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        os.write(sys.stdout.fileno(), b"\0")
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, _READ_BYTES)
                if key.data is not None:
                    self._take_answer(key.fd, key.data, data)
                elif data:
                    self._take_orders(data)
                else:
                    for id in self._pids:
                        self._end(id)
                    return

    def _take_orders(self, data: bytes) -> None:
        self._orders += data
        while len(self._orders) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._orders)[0]
            if len(self._orders) < end:
                return
            order = _decode_order(self._orders[LENGTH.size : end])
            del self._orders[:end]
            if order.grammar is not None:
                self._begin(order.id, order.grammar)
            elif order.id in self._pids:
                self._end(order.id)

    def _begin(self, id: int, grammar: Grammar) -> None:
        answer, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            _try(id, grammar, self._tokenizer, theirs)
        os.close(theirs)
        self._pids[id], self._answers[id] = pid, bytearray()
        self._selector.register(answer, selectors.EVENT_READ, id)

    def _end(self, id: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[id], signal.SIGKILL)

    def _take_answer(self, fd: int, id: int, data: bytes) -> None:
        self._answers[id] += data
        if data:
            return
        self._selector.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(self._pids.pop(id), 0)
        answer = bytes(self._answers.pop(id))
        if status != 0:
            answer = framed(Verdict(id, is_broken=True))
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _try(id: int, grammar: Grammar, tokenizer: LLTokenizer, out: int) -> None:
    """Write the verdict on a grammar to `out`, and end this process."""
    os.close(sys.stdin.fileno())
    os.close(sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_REAL, LONGEST_TRIAL_S)

    def answer() -> None:
        with open(out, "wb") as file:
            file.write(framed(_verdict_on(id, grammar, tokenizer)))
        os._exit(0)

    try:
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=answer, name="tandem-trial")
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _verdict_on(id: int, grammar: Grammar, tokenizer: LLTokenizer) -> Verdict:
    try:
        return Verdict(id, tried_source(grammar, tokenizer))
    except InvalidRequestError as error:
        return Verdict(id, fault=error.message, field=error.param or "grammar")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the worker
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer_path, vocab_size, *eos_token_ids = sys.argv[1:]
    tokenizer = load_tokenizer(
        Path(tokenizer_path), int(vocab_size), tuple(map(int, eos_token_ids))
    )
    Trials(tokenizer).serve()


if __name__ == "__main__":
    main()
