"""A rank above 0 that ends in a handoff, as it is to post or has posted, or that stops there."""

import os
import signal

from tandem.engine.execution import follower
from tandem.transfer.agents.reactor import HELLO, TransferOrder, TransferReactor
from tandem.worker.rank_process import serving

WHEN_VARIABLE = "TEST_RANK_DIES"  # before | after | stops: inside, without an end

if __name__ == "__main__":
    post = TransferReactor.post

    def post_and_die(self: TransferReactor, order: TransferOrder) -> None:
        is_of_handoff = order.operation == "WRITE" and order.notice != HELLO
        when = os.environ[WHEN_VARIABLE] if is_of_handoff else "never"
        if when == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        post(self, order)
        if when == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    TransferReactor.post = post_and_die  # type: ignore[method-assign]
    follower.main(serving)
