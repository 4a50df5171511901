"""What prefill workers tell a decode worker about its handoffs, by either plane."""

import logging
import time

import msgspec

from tandem.decode.remote import RemotePrefills
from tandem.runtime.context import RequestContext
from tandem.runtime.messages import Ack, Claim, ClaimRefused, FirstToken, Settled, encode
from tandem.runtime.request_plane import RequestServer, Responder
from tandem.transfer.landed import decode_landed, decode_settled

logger = logging.getLogger(__name__)


class HandoffMessages:
    """Three endpoints and the transfer plane's notices; what no open handoff expects is dropped."""

    def __init__(self, remotes: RemotePrefills) -> None:
        self._remotes = remotes

    def register(self, server: RequestServer) -> None:
        """Serves the handoff endpoints."""
        server.register("claim", self._on_claim)
        server.register("first_token", self._on_first_token)
        server.register("settled", self._on_settled)

    async def _on_claim(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        """Grants the claim; the stream stays open until no write of it can land any more."""
        claim = msgspec.msgpack.decode(payload, type=Claim)
        remote = self._remotes.find(claim.handoff_id)
        if remote is None:
            answer.send(encode(ClaimRefused("unknown")))
            return
        if not self._remotes.claim(remote, claim, answer):
            return
        forget = context.on_cancel(lambda: self._remotes.stream_lost(remote, claim, answer))
        try:
            await remote.ended.wait()
        finally:
            forget()

    async def _on_first_token(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        first = msgspec.msgpack.decode(payload, type=FirstToken)
        remote = self._remotes.find(first.handoff_id)
        if remote is not None:
            self._remotes.first_token(remote, first)
        answer.send(encode(Ack()))

    async def _on_settled(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        settled = msgspec.msgpack.decode(payload, type=Settled)
        remote = self._remotes.find(settled.handoff_id)
        if remote is not None:
            self._remotes.run(remote, remote.machine.settled(settled))
        answer.send(encode(Ack()))

    def on_notification(self, data: bytes) -> None:
        """A message over the transfer plane, from anybody."""
        landed = decode_landed(data)
        if landed is not None:
            remote = self._remotes.find(landed.handoff_id)
            if remote is not None:
                actions = remote.machine.landed(landed, time.perf_counter())
                self._remotes.run(remote, actions)
            return
        settled = decode_settled(data)
        remote = None if settled is None else self._remotes.find(settled.handoff_id)
        if settled is None:
            logger.warning("dropped %d bytes over the transfer plane: no such message", len(data))
        elif remote is not None:
            self._remotes.run(remote, remote.machine.settled_notice(settled))
