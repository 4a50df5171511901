"""One run of a ticket towards its decode worker: the claim, and the messages that follow it."""

import asyncio
import contextlib
import logging
import secrets

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import DeadlineError, TandemError, TransferError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.store.discovery import TypedView
from tandem.runtime.wire.bounds import MAX_TEXT
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.runtime.wire.decoding import Decode, decoder
from tandem.runtime.wire.handoff_messages import Claim, ClaimAnswer, FirstToken, PrefillJob, Settled
from tandem.runtime.wire.messages import encode
from tandem.transfer.agents.group import TransferGroup

logger = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 5.0
CLAIM_TIMEOUT_S = 2.0  # for the answer, which a decode worker has at once
_decode_answer: Decode[ClaimAnswer] = decoder(ClaimAnswer)


class Claimant:
    """Speaks for one run of a ticket. `run_id` tells the runs of one ticket apart."""

    def __init__(
        self,
        node: Node,
        group: TransferGroup,
        peers: TypedView[TransferMetadata],
        ticket: PrefillJob,
    ) -> None:
        self.run_id = secrets.token_bytes(8)
        self.request_id = f"{ticket.handoff_id.hex()}.{ticket.attempt}"
        self._node = node
        self._group = group
        self._peers = peers
        self.ticket = ticket
        self._peer: TransferMetadata | None = None

    def find_peer(self) -> TransferMetadata | None:
        """Return the decode worker's transfer metadata, which have the address of its claims.

        None without them: only registered decode workers are dialed.
        """
        self._peer = self._peers.items.get(self.ticket.decode_instance)
        return self._peer

    async def claim(self, context: RequestContext) -> ResponseStream:
        """Claim the ticket at the peer; the answer is the first item of the stream."""
        node, ticket = self._node, self.ticket
        claim = Claim(
            ticket.handoff_id,
            ticket.attempt,
            node.instance_id,
            node.epoch,
            self._group.layout.tp_size,
            self.run_id,
        )
        return await node.client.open(self._address, "claim", encode(claim), context)

    async def read_answer(self, stream: ResponseStream) -> ClaimAnswer:
        """Return the answer to the claim. Settle if none can be read in time."""
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                return _decode_answer(await anext(stream, b""))
        except (TandemError, TimeoutError) as error:
            # The claim may have been granted: without this the lease would have to run out.
            reason = str(error) or f"no answer to the claim within {CLAIM_TIMEOUT_S:g} s"
            await self.settle_unwritten(reason)
            raise DeadlineError(reason) if isinstance(error, TimeoutError) else error from None

    async def send_first_token(self, first: FirstToken) -> None:
        await self.tell("first_token", encode(first))

    async def settle_unwritten(self, reason: str) -> None:
        """Tell the decode worker that nothing was written, and why."""
        ticket, why = self.ticket, reason[:MAX_TEXT]
        await self.settle(Settled(ticket.handoff_id, ticket.attempt, 0, 0, why, run=self.run_id))

    async def settle(self, settled: Settled, notice: bytes | None = None) -> None:
        """Tell the decode worker that nothing can land any more.

        Send `notice` over the transfer plane if the request plane fails.
        """
        try:
            await self.tell("settled", encode(settled))
        except TandemError as error:
            logger.warning("handoff %s: not settled: %s", self.request_id, error)
            if notice is not None:
                with contextlib.suppress(TransferError):
                    await self._group.notify(self.ticket.decode_instance, notice)

    async def tell(self, endpoint: str, payload: bytes) -> bytes:
        """Call an endpoint of the decode worker and return its answer."""
        context = RequestContext(timeout_s=SETTLE_TIMEOUT_S)
        async with context:
            return await self._node.client.call(self._address, endpoint, payload, context)

    @property
    def _address(self) -> str:
        assert self._peer is not None, "find_peer() comes first"
        return self._peer.address
