"""A prefill worker, and a decode worker that does only what a test tells it to."""

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tandem.engine.schedule.sequence import Sequence
from tandem.engine.step.outcome import SampledToken
from tandem.prefill.config import PrefillConfig
from tandem.prefill.worker import PrefillRole
from tandem.queue.config import QueueConfig
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import UnavailableError
from tandem.runtime.plane.server import Responder
from tandem.runtime.store.discovery import register_transfer
from tandem.runtime.wire.handoff_messages import (
    Ack,
    CancelHandoff,
    Claim,
    Claimed,
    ClaimRefused,
    FirstToken,
    PrefillJob,
    PrefixBlocks,
    PrefixRequest,
    Settled,
)
from tandem.runtime.wire.messages import SamplingParams, StopConditions, encode, pack_tokens
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.landed import Landed, decode_landed
from tandem.worker.settings import WorkerSettings
from tandem.worker.worker import Worker
from tests.handoff_peer import MODEL, NUM_BLOCKS, QUEUE, TRANSFER, HandoffPeer, Text, engine_config
from tests.services import eventually

GREEDY = SamplingParams(temperature=0)
SIX = StopConditions(max_tokens=6, ignore_eos=True)


@dataclass
class Offer:
    """A handoff of ours and what the prefill worker said about it."""

    job: PrefillJob
    seq: Sequence
    answer: Claimed | ClaimRefused
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    claims: list[Claim] = field(default_factory=list)
    first: FirstToken | None = None
    refuses_first: bool = False
    pulled: list[int] = field(default_factory=list)  # ordinals that were asked for
    spoils_pulls: int = 0  # flips bits of a checksum
    settled: list[Settled] = field(default_factory=list)
    stream: Responder | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def retract(self) -> None:
        assert self.stream is not None
        self.stream.send(encode(CancelHandoff(self.job.handoff_id, self.job.attempt)))


class Stage:
    """One real prefill worker and one puppet. `config` overrides the prefill section."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        model: Path,
        *,
        transfer: TransferConfig = TRANSFER,
        ack_wait_s: float = 0.3,
        max_deliver: int = QUEUE.max_deliver,
        **config: object,
    ) -> None:
        self.queue_config = QueueConfig(ack_wait_s=ack_wait_s, max_deliver=max_deliver)
        self.peer = HandoffPeer(runtime, model, "decode", transfer)
        engine = engine_config(model, max_num_batched_tokens=32)
        settings = WorkerSettings(runtime, engine, transfer, self.queue_config, MODEL)
        self.process = Worker(settings, "prefill")
        self.worker = PrefillRole(self.process, PrefillConfig.model_validate(config))
        self.offers: dict[bytes, Offer] = {}

    async def __aenter__(self) -> "Stage":
        server = self.peer.node.server
        server.register("claim", self._on_claim)
        server.register("first_token", self._on_first_token)
        server.register("settled", self._on_settled)
        server.register("prefix_blocks", self._on_prefix_blocks)
        await self.peer.__aenter__()
        node = self.peer.node
        self.metadata = self.peer.group.metadata(node.server.address, MODEL, self.peer.deployment)
        await register_transfer(node.discovery, node.config.namespace, self.metadata)
        await self.process.startup(self.worker)
        await eventually(self.is_known)
        self.rates = self.worker._group.links[self.peer.node.instance_id].rates
        return self

    def is_known(self) -> bool:
        """The worker has met the puppet and knows what the way to it is worth."""
        link = self.worker._group.links.get(self.peer.node.instance_id)
        return link is not None and link.rates is not None

    async def __aexit__(self, *_: object) -> None:
        for offer in self.offers.values():
            offer.ended.set()
        await self.process.stop()
        await self.peer.__aexit__()

    # ---- the puppet's endpoints ---------------------------------------------------------------

    async def _on_claim(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        claim = msgspec.msgpack.decode(payload, type=Claim)
        offer = self.offers[claim.handoff_id]
        offer.claims.append(claim)
        await offer.may_answer.wait()
        offer.stream = answer
        answer.send(encode(offer.answer))
        if isinstance(offer.answer, Claimed):
            context.on_cancel(offer.ended.set)
            await offer.ended.wait()

    async def _on_first_token(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        first = msgspec.msgpack.decode(payload, type=FirstToken)
        offer = self.offers[first.handoff_id]
        if offer.refuses_first:
            raise UnavailableError("not now")
        assert offer.first is None, "a first token sent twice"
        offer.first = first
        answer.send(encode(Ack()))

    async def _on_settled(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        settled = msgspec.msgpack.decode(payload, type=Settled)
        self.offers[settled.handoff_id].settled.append(settled)
        answer.send(encode(Ack()))

    async def _on_prefix_blocks(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        request = msgspec.msgpack.decode(payload, type=PrefixRequest)
        offer, group = self.offers[request.handoff_id], self.peer.group
        offer.pulled = list(request.ordinals)
        blocks = [(ordinal, offer.seq.block_table[ordinal]) for ordinal in request.ordinals]
        layers, (ranks,) = (
            range(group.layout.num_layers),
            group.layout.rank_pairs_from(request.tp_size),
        )
        checksums = await group.checksums(ranks, layers, [block for _, block in blocks])
        checksums[0] ^= offer.spoils_pulls
        answer.send(encode(PrefixBlocks(blocks, [checksums])))

    # ---- what a test tells it to do -----------------------------------------------------------

    def prepare(
        self,
        prompt: list[int],
        *,
        sampling: SamplingParams = GREEDY,
        stop: StopConditions = SIX,
        lease_ms: int = 60_000,
        num_generated: int = 0,
    ) -> Offer:
        """Reserves blocks for a prompt, the last `num_generated` tokens of which are of its answer.

        Nobody is told yet.
        """
        handoff_id, node = secrets.token_bytes(16), self.peer.node
        num_prompt_tokens = len(prompt) - num_generated
        seq = Sequence(handoff_id.hex(), list(prompt), num_prompt_tokens, sampling, stop)
        reservation = self.peer.engine.reserve(seq)
        assert reservation is not None
        job = PrefillJob(
            handoff_id=handoff_id,
            attempt=1,
            deployment=self.peer.deployment,
            decode_instance=node.instance_id,
            decode_epoch=node.epoch,
            num_tokens=len(prompt),
            num_uncached_tokens=len(prompt) - reservation.num_cached_tokens,
            deadline_ms=60_000,
        )
        grant = Claimed(
            secret=secrets.token_bytes(16),
            lease_ms=lease_ms,
            token_ids=pack_tokens(prompt),
            sampling=sampling,
            stop=stop,
            fill=reservation.fill,
            cached_ordinals=reservation.cached_ordinals,
            num_generated=num_generated,
        )
        offer = self.offers[handoff_id] = Offer(job, seq, grant)
        return offer

    async def offer(self, prompt: list[int], *, waits: bool = False, **options: object) -> Offer:
        """Publishes a ticket; its claim is granted at once, unless it `waits` for `may_answer`."""
        offer = self.prepare(prompt, **options)
        await self.publish(offer, waits=waits)
        return offer

    async def publish(self, offer: Offer, *, waits: bool = False) -> None:
        """Publishes the ticket of an offer that was prepared."""
        if not waits:
            offer.may_answer.set()
        await self.peer.queue.publish(offer.job)

    @contextmanager
    def frozen_engine(self) -> Iterator[None]:
        """The worker's engine thread computes nothing within."""
        gate = threading.Event()
        self.worker.loop.post(lambda engine: gate.wait(60))
        try:
            yield
        finally:
            gate.set()

    # ---- looking ------------------------------------------------------------------------------

    async def forget(self) -> None:
        """Nothing is reserved or cached on either side, and the worker's speed is not known."""
        for offer in self.offers.values():
            offer.ended.set()
        await self.worker.loop.call(lambda engine: engine.block_pool.clear_cache())
        self.peer.forget()
        self.worker._prompts.rate.s_per_token = None
        await eventually(self.is_known)
        self.worker._group.links[self.peer.node.instance_id].rates = self.rates

    def landed(self, offer: Offer) -> list[Landed]:
        """Return the notices of the writes that have landed, in the order of their posts."""
        notices = [decode_landed(notice) for notice in self.peer.notices]
        own = [n for n in notices if n is not None and n.handoff_id == offer.job.handoff_id]
        return sorted(own, key=lambda notice: notice.sequence_number)

    async def settled(self, offer: Offer) -> Settled:
        await eventually(lambda: bool(offer.settled))
        (settled,) = offer.settled
        offer.ended.set()
        return settled

    async def text(self, offer: Offer) -> Text:
        """Decodes on what landed, after checking it as a decode worker does."""
        assert isinstance(offer.answer, Claimed)
        settled = await self.settled(offer)
        assert (settled.num_failed, settled.error) == (0, "")
        fill = dict(offer.answer.fill)
        num_layers = self.peer.group.layout.num_layers
        num_units = len(fill) * num_layers
        await eventually(
            lambda: sum(len(n.blocks) * len(n.layers) for n in self.landed(offer)) == num_units
        )
        notices = self.landed(offer)
        assert len(notices) == settled.num_completed
        assert all(notice.secret == offer.answer.secret for notice in notices)
        (ranks,) = self.peer.group.layout.rank_pairs_from(1)
        for notice in notices:
            blocks = [fill[ordinal] for ordinal, _ in notice.blocks]
            found = await self.peer.group.checksums(ranks, notice.layers, blocks)
            assert found == [checksum for _, checksum in notice.blocks]
        await eventually(lambda: offer.first is not None)
        assert offer.first is not None
        token = SampledToken(offer.first.token_id, offer.first.logprobs)
        output = self.peer.engine.admit(offer.seq.request_id, token)
        outputs = [output]
        if output.finish_reason is None:
            outputs += self.peer.run(offer.seq.request_id)
        logprobs = [part for output in outputs for part in output.logprobs or []]
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        return Text(token_ids, logprobs, outputs[-1].finish_reason, outputs[-1].stop_token_id)

    def undisturbed(
        self,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        stop: StopConditions = SIX,
        salt: str = "undisturbed",
    ) -> Text:
        return self.peer.undisturbed(prompt, sampling, stop, salt)

    @property
    def num_held(self) -> int:
        """Blocks of the prefill worker that some job needs."""
        return self.worker.engine.block_pool.num_held

    async def balanced(self) -> None:
        """Until no job is left anywhere and the prefill worker holds nothing."""
        worker = self.worker
        await eventually(lambda: not worker._jobs)
        await worker.loop.call(lambda engine: engine.check_invariants())
        pool = worker.engine.block_pool
        assert pool.num_free + pool.num_cached == NUM_BLOCKS
        assert not worker._prompts.open
        while (depth := await self.peer.queue.depth()).num_jobs or depth.num_in_progress:
            await asyncio.sleep(0.01)
