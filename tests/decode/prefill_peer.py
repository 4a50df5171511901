"""A decode worker, and a prefill worker that does only what a test tells it to."""

import asyncio
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from prometheus_client import REGISTRY

from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.worker import DecodeRole
from tandem.engine.schedule.sequence import Sequence as EngineSequence
from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.membership.model_files import read_model_files
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.store.discovery import register_instance
from tandem.runtime.wire.cluster_messages import WorkerStatus
from tandem.runtime.wire.handoff_messages import (
    CancelHandoff,
    Claim,
    ClaimAnswer,
    Claimed,
    ClaimRefused,
    FirstToken,
    PrefillJob,
    PrefixBlocks,
    PrefixRequest,
    Settled,
)
from tandem.runtime.wire.messages import (
    GenerateRequest,
    PrefillPlace,
    PrefillReport,
    SamplingParams,
    StopConditions,
    Targets,
    TokenDelta,
    encode,
    pack_tokens,
    unpack_tokens,
)
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs
from tandem.transfer.agents.group import WriteOrder
from tandem.transfer.agents.link import Link
from tandem.transfer.agents.reactor import HELLO
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.landed import Landed, SettledNotice, encode_landed, encode_settled
from tandem.worker.settings import WorkerSettings
from tandem.worker.worker import Worker
from tests.handoff_peer import MODEL, QUEUE, TRANSFER, HandoffPeer, Text, engine_config
from tests.services import eventually

PROMPT = [7 + 3 * i % 250 for i in range(21)]  # five full blocks of 4 and one token


def count(name: str, **labels: str) -> float:
    """The value of a counter of decode workers of this process."""
    return REGISTRY.get_sample_value(f"tandem_{name}", {"model": MODEL, **labels}) or 0.0


@dataclass
class Answer:
    """A generate stream as it goes on. `text` is what arrived so far."""

    context: RequestContext
    text: Text = field(default_factory=lambda: Text([], []))
    report: PrefillReport | None = None
    error: TandemError | None = None
    places: list[PrefillPlace] = field(default_factory=list)  # of all reports
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, stream: ResponseStream) -> None:
        try:
            async for item in stream:
                self.take(msgspec.msgpack.decode(item, type=TokenDelta))
        except TandemError as error:
            self.error = error
        self.ended.set()

    def take(self, delta: TokenDelta) -> None:
        assert self.text.finish_reason is None, "a delta after the last"
        self.text.token_ids += delta.token_ids
        self.text.logprobs += delta.logprobs or []
        self.text.finish_reason, self.text.stop_token_id = delta.finish_reason, delta.stop_token_id
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.append(delta.prompt_logprobs)
        if delta.prefill is not None:
            self.report = delta.prefill
            self.places.append(delta.prefill.place)

    async def whole(self) -> Text:
        """The text, once it is complete; raises what ended it instead."""
        await self.ended.wait()
        if self.error is not None:
            raise self.error
        # A second report comes where a handoff failed after its first token was sent.
        assert self.places in (["local"], ["remote"], ["remote", "local"])
        return self.text


@dataclass
class Work:
    """A claim of ours: what was granted, on which stream, and what we computed for it."""

    job: PrefillJob
    grant: Claimed
    stream: ResponseStream
    blocks: list[int] = field(default_factory=list)
    first: FirstToken | None = None
    num_written: int = 0
    notices: list[tuple[int, bytes]] = field(default_factory=list)


class Stage:
    """One real decode worker and one puppet.

    `engine` and `config` override settings of its engine and of the disagg section.
    """

    def __init__(
        self,
        runtime: RuntimeConfig,
        model: Path,
        *,
        transfer: TransferConfig = TRANSFER,
        engine: Mapping[str, object] = MappingProxyType({}),
        **config: object,
    ) -> None:
        patience = {"claim_timeout_ms": 60_000, "handoff_timeout_ms": 60_000}
        fields = {"policy": Policy.ALWAYS_REMOTE, **patience, **config}
        disagg = DisaggConfig.model_validate(fields)
        self.peer = HandoffPeer(runtime, model, "prefill", transfer)
        settings = WorkerSettings(runtime, engine_config(model, **engine), transfer, QUEUE, MODEL)
        self.process = Worker(settings, "decode")
        self.worker = DecodeRole(self.process, disagg, read_model_files(model))
        self.readers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Stage":
        await self.peer.__aenter__()
        await self.process.startup(self.worker)
        await self.register(os.getpid())
        await self.connect()
        return self

    async def connect(self) -> Link:
        return await self.peer.group.connect(self.worker.handoffs.group.metadata())

    async def __aexit__(self, *_: object) -> None:
        await self.process.stop()
        await self.peer.__aexit__()
        await asyncio.gather(*self.readers)

    async def register(self, pid: int, *rank_pids: int) -> None:
        """Makes the puppet known as a prefill worker with these process ids."""
        node = self.peer.node
        instance = node.instance(EndpointAddress(node.config.namespace, "prefill", "prefill"))
        pids = {"pid": pid, "rank_pids": list(rank_pids)}
        instance = msgspec.structs.replace(instance, **pids, host=socket.gethostname())
        await register_instance(self.peer.node.discovery, instance)
        view = self.worker._prefill_instances
        await eventually(lambda: view.items.get(instance.instance_id) == instance)

    # ---- the client ---------------------------------------------------------------------------

    async def ask(
        self,
        prompt: list[int],
        *,
        sampling: SamplingParams | None = None,
        stop: StopConditions | None = None,
        request_id: str = "",
        num_generated: int = 0,
        place: PrefillPlace | None = None,
        targets: Targets | None = None,
    ) -> Answer:
        """Sends a prompt, the last `num_generated` tokens of which are of the answer."""
        request = GenerateRequest(
            request_id=request_id or new_id(),
            model=MODEL,
            token_ids=pack_tokens(prompt),
            sampling=sampling or SamplingParams(temperature=0),
            stop=stop or StopConditions(max_tokens=6, ignore_eos=True),
            deadline_ms=60_000,
            prefill_place=place,
            num_generated=num_generated,
            targets=targets,
        )
        answer = Answer(RequestContext(timeout_s=60))
        stream = await self.peer.node.client.open(
            self.worker.node.server.address,
            str(self.worker.endpoint),
            encode(request),
            answer.context,
        )
        self.readers.add(asyncio.create_task(answer.read(stream)))
        return answer

    def undisturbed(
        self,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        stop: StopConditions | None = None,
    ) -> Text:
        sampling = sampling or SamplingParams(temperature=0)
        stop = stop or StopConditions(max_tokens=6, ignore_eos=True)
        return self.peer.undisturbed(prompt, sampling, stop)

    # ---- the puppet ---------------------------------------------------------------------------

    async def ticket(self) -> PrefillJob:
        """The next ticket of the queue, acknowledged."""
        (delivery,) = await self.peer.queue.receive(1, 60.0)
        await delivery.ack()
        return delivery.job

    async def claim(
        self, job: PrefillJob, *, instance_id: str = "", epoch: str = "", run: bytes = b""
    ) -> Work | ClaimRefused:
        node = self.peer.node
        claimant = (instance_id or node.instance_id, epoch or node.epoch)
        claim = Claim(job.handoff_id, job.attempt, *claimant, run=run)
        context = RequestContext(timeout_s=60)
        address = self.worker.node.server.address
        stream = await node.client.open(address, "claim", encode(claim), context)
        answer = await self.hear(stream)
        if isinstance(answer, ClaimRefused):
            return answer
        assert isinstance(answer, Claimed)
        return Work(job, answer, stream)

    async def hear(self, stream: ResponseStream) -> ClaimAnswer:
        answer: ClaimAnswer = msgspec.msgpack.decode(await anext(stream), type=ClaimAnswer)
        return answer

    async def claimed(self, job: PrefillJob | None = None) -> Work:
        """Claims the ticket, by default the next, and computes the prompt; nothing is sent yet."""
        work = await self.claim(job or await self.ticket())
        assert isinstance(work, Work)
        grant, request_id = work.grant, work.job.handoff_id.hex()
        token_ids = unpack_tokens(grant.token_ids)
        seq = EngineSequence(
            request_id,
            token_ids,
            len(token_ids) - grant.num_generated,
            grant.sampling,
            grant.stop,
            prefill_only=True,
        )
        self.peer.engine.add(seq)
        last = self.peer.run(request_id)[-1]
        work.blocks = list(seq.block_table)
        logprobs = last.logprobs[0] if last.logprobs else None
        work.first = FirstToken(
            work.job.handoff_id,
            work.job.attempt,
            grant.secret,
            b"",
            last.token_ids[0],
            logprobs=logprobs,
        )
        return work

    async def handoff(self, prompt: list[int], **options: Any) -> tuple[Answer, Work]:
        """`ask`, and `claimed`."""
        answer = await self.ask(prompt, **options)
        return answer, await self.claimed()

    async def write(
        self,
        work: Work,
        *,
        fill: list[tuple[int, int]] | None = None,
        flip: int = 0,
        notice_is_lost: bool = False,
    ) -> bytes:
        """Writes blocks as the ordinals say; the notice of it. `flip` spoils checksums."""
        fill = work.grant.fill if fill is None else fill
        local = [work.blocks[ordinal] for ordinal, _ in fill]
        layers = range(self.peer.group.layout.num_layers)

        def landed(sums: Iterable[int]) -> bytes:
            checksums = [checksum ^ flip for checksum in sums]
            ordinals = [ordinal for ordinal, _ in fill]
            blocks = tuple(zip(ordinals, checksums, strict=True))
            handoff = (work.job.handoff_id, work.job.attempt, work.grant.secret)
            return encode_landed(Landed(*handoff, 0, work.num_written, layers, blocks))

        pairs = list(zip(local, (block for _, block in fill), strict=True))
        link = await self.connect()
        sent: list[bytes] = []

        def send(sums: Sequence[int]) -> bytes:
            sent.append(landed(sums))
            return HELLO if notice_is_lost else sent[0]

        order = WriteOrder(link.rank_pairs[0], layers, pairs, send)
        await self.peer.group.write(link, order)
        (notice,) = sent
        work.num_written += 1
        work.notices.append((0, notice))
        return notice

    async def send_first(self, work: Work) -> None:
        assert work.first is not None
        await self.tell("first_token", encode(work.first))

    async def settle(self, work: Work, *, error: str = "") -> None:
        job = work.job
        settled = Settled(job.handoff_id, job.attempt, work.num_written, 0, error, work.notices)
        await self.tell("settled", encode(settled))

    async def settle_by_notice(self, work: Work) -> None:
        job = work.job
        secret, num_written = work.grant.secret, work.num_written
        settled = SettledNotice(job.handoff_id, job.attempt, secret, num_written, 0)
        await self.notify(encode_settled(settled))

    async def deliver(self, work: Work) -> None:
        """All that a prefill worker does after computing, in the usual order."""
        await self.send_first(work)
        await self.write(work)
        await self.settle(work)

    async def notify(self, notice: bytes) -> None:
        await self.peer.group.notify(self.worker.node.instance_id, notice)

    async def tell(self, endpoint: str, payload: bytes) -> bytes:
        context = RequestContext(timeout_s=60)
        address = self.worker.node.server.address
        return await self.peer.node.client.call(address, endpoint, payload, context)

    async def ask_for_prefix(self, work: Work, ordinals: list[int]) -> PrefixBlocks:
        request = PrefixRequest(work.job.handoff_id, work.job.attempt, work.grant.secret, ordinals)
        answer = await self.tell("prefix_blocks", encode(request))
        return msgspec.msgpack.decode(answer, type=PrefixBlocks)

    async def status(self) -> WorkerStatus:
        return msgspec.msgpack.decode(await self.tell("status", b""), type=WorkerStatus)

    # ---- looking ------------------------------------------------------------------------------

    async def forget(self) -> None:
        """Nothing is cached on either side, and no failure is held against the puppet."""
        await self.worker.loop.call(lambda engine: engine.block_pool.clear_cache())
        self.peer.forget()
        self.worker.handoffs.health._records.clear()

    @property
    def num_quarantined(self) -> int:
        return self.worker.engine.block_pool.num_quarantined

    async def retracted(self, work: Work) -> None:
        """Waits for the word that this claim is not wanted any more."""
        assert isinstance(await self.hear(work.stream), CancelHandoff)

    async def balanced(self) -> None:
        """Until nothing is open and every block is free or cached; then the books are checked."""
        worker, pool = self.worker, self.worker.engine.block_pool
        await eventually(lambda: not worker.active and worker.handoffs.num_open == 0)
        await eventually(lambda: pool.num_free + pool.num_cached == pool.num_blocks)
        await worker.loop.call(lambda engine: engine.check_invariants())
        assert worker.prefill_view.num_reserved == worker.prefill_view.num_taken
        assert worker.handoffs.group._first._num_expected == 0
