"""What prefill workers tell a decode worker about its handoffs, by either plane."""

import logging

import msgspec

from tandem.decode.remote import RemotePrefills
from tandem.runtime.context import RequestContext
from tandem.runtime.messages import (
    Ack,
    Claim,
    ClaimRefused,
    FirstToken,
    PrefixBlocks,
    PrefixRequest,
    Settled,
    encode,
)
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.transfer.handoff.landed import decode_landed, decode_settled

logger = logging.getLogger(__name__)


class HandoffMessages:
    """Four endpoints and the transfer plane's notices; what no open handoff expects is dropped."""

    def __init__(self, remotes: RemotePrefills) -> None:
        self._remotes = remotes

    def register(self, server: RequestServer) -> None:
        """Serves the handoff endpoints."""
        server.register("claim", self._on_claim)
        server.register("first_token", self._on_first_token)
        server.register("settled", self._on_settled)
        server.register("prefix_blocks", self._on_prefix_blocks)

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
            self._remotes.settled(remote, settled)
        answer.send(encode(Ack()))

    async def _on_prefix_blocks(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        request = msgspec.msgpack.decode(payload, type=PrefixRequest)
        remote = self._remotes.find(request.handoff_id)
        blocks = PrefixBlocks()
        if remote is not None:
            blocks = await self._remotes.prefix_blocks(remote, request)
        answer.send(encode(blocks))

    def on_notification(self, decode_rank: int, data: bytes) -> None:
        """A message to one of our ranks over the transfer plane, from anybody."""
        landed = decode_landed(data)
        if landed is not None:
            remote = self._remotes.find(landed.handoff_id)
            if remote is not None:
                self._remotes.landed(remote, landed, decode_rank)
            return
        settled = decode_settled(data)
        remote = None if settled is None else self._remotes.find(settled.handoff_id)
        if settled is None:
            logger.warning("dropped %d bytes over the transfer plane: no such message", len(data))
        elif remote is not None:
            self._remotes.run(remote, remote.machine.settled_notice(settled))
