"""The process of a rank above 0: it computes the steps that rank 0 sends, and ends with it."""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch

from tandem.engine.architecture.shard import Shard
from tandem.engine.config import EngineConfig
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.execution.resolve import resolve
from tandem.engine.ranks.apart import ApartRank
from tandem.engine.ranks.channel import Read, ReadyMessage, StartMessage, receive, send
from tandem.engine.ranks.rank import Rank
from tandem.engine.ranks.step_message import StepMessage
from tandem.kernels.ranks.missing import MissingRankError
from tandem.runtime.errors import TandemError
from tandem.runtime.process.logs import setup_logging

logger = logging.getLogger(__name__)


# What goes on while a rank follows; the socket is for orders about its pool, where it has its own.
Beside = Callable[[ModelRunner, socket.socket | None], AbstractContextManager[object]]


def follow(channel: socket.socket, beside: Beside) -> None:
    """Compute steps until rank 0 closes its end of `channel`."""
    with channel.makefile("rb") as file:
        data = receive(file)
        if data is None:
            return
        start = msgspec.msgpack.decode(data, type=StartMessage)
        setup_logging(start.log_level, f"rank {start.rank}", format=start.log_format)
        try:
            runner = _build(start, channel, file)
        except TandemError as error:
            send(channel, msgspec.msgpack.encode(ReadyMessage(error.message)))
            return
        orders = None if start.order_channel is None else socket.socket(fileno=start.order_channel)
        with beside(runner, orders):
            while (data := receive(file)) is not None:
                runner.follow(msgspec.msgpack.decode(data, type=StepMessage))


def _build(start: StartMessage, channel: socket.socket, file: Read) -> ModelRunner:
    """Build the runner of this rank's share. Raises TandemError, before or after it is ready."""
    config = EngineConfig.model_validate_json(start.config)
    _, model = resolve(config, choose_model_config(config.model, config.model_impl))
    shard = Shard(model, config.tp, start.rank)

    def ready() -> None:
        send(channel, msgspec.msgpack.encode(ReadyMessage()))
        if receive(file) is None:
            raise ConnectionAbortedError("rank 0 has ended")

    return ModelRunner(config, rank=_rank(start, shard, config.device, ready))


def _rank(start: StartMessage, shard: Shard, device: str, ready: Callable[[], None]) -> Rank:
    if start.exchange_file is None or start.pool_file is None:
        return ApartRank(shard, torch.device(device), start.folder, ready)
    # Not at the top: it loads the kernels in C.
    from tandem.engine.ranks.shared_memory import SharedFiles, SharedRank

    files = SharedFiles(start.exchange_file, start.pool_file)
    return SharedRank(shard, files, start.leader_pid, ready)


def main(beside: Beside = lambda *_: nullcontext()) -> None:
    """Follow rank 0, over the socket whose file descriptor is the only argument."""
    # Rank 0 ends the others once it has drained; these signals may come to all of them at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            follow(channel, beside)
        except (MissingRankError, ConnectionError):  # rank 0 says so, or is gone
            logger.debug("another rank has ended", exc_info=True)
    os._exit(0)  # at once: memory that rank 0 shares is nobody's here


if __name__ == "__main__":
    main()
