"""The process of a rank above 0: it computes steps, and moves the KV of a pool of its own."""

import socket
from contextlib import AbstractContextManager, nullcontext

from tandem.engine.execution import follower
from tandem.engine.execution.model_runner import ModelRunner
from tandem.transfer.agents.agent_server import serving_orders


def serving(runner: ModelRunner, orders: socket.socket | None) -> AbstractContextManager[object]:
    """Carry out rank 0's orders about the rank's pool, where it has its own, beside the steps."""
    if orders is None:
        return nullcontext()
    return serving_orders(orders, runner.kv_cache, runner.marks.has_passed)


if __name__ == "__main__":
    follower.main(serving)
