"""One worker process: the parts that its roles stand on, started and closed in one order."""

import asyncio
import contextlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tandem.emulation.link import EmulatedGroup
from tandem.emulation.runner import EmulatedRunner
from tandem.engine.config import DECODE_STEP_TOKENS, EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.core.first_costs import measure_costs
from tandem.engine.core.loop import EngineLoop, build_in_thread
from tandem.engine.schedule.matcher import Matcher
from tandem.engine.schedule.outputs import LoadStats
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.step.outcome import DeviceLostError
from tandem.engine.step.token_rules import TokenRules
from tandem.grammar.compiler import GrammarCompiler
from tandem.queue.deployment import deployment_id
from tandem.queue.jetstream import JetStreamQueue
from tandem.runtime.bus.events import load_subject
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.membership.model_files import weights_fingerprint
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.process.lifecycle import Lifecycle, freeze_gc
from tandem.runtime.tasks import keep_running
from tandem.runtime.tracing.trace import TraceFile
from tandem.runtime.wire.cluster_messages import LoadReport, RoleChange, WorkerRole, WorkerStatus
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import Grammar, encode
from tandem.transfer.agents.far_agent import OtherRanks
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.layout import KvLayout
from tandem.transfer.network_devices import confine_ucx
from tandem.worker.controls import Controls
from tandem.worker.kernel_builds import KernelBuilds
from tandem.worker.load_reports import LoadReports, OwnPrompts
from tandem.worker.metrics import WorkerMetrics
from tandem.worker.role import Details, Role
from tandem.worker.roles import Roles
from tandem.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tandem.engine.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 1024 * 1024  # of requests: a prompt of four million tokens
EXIT_DEVICE_LOST = 72  # the GPU answers this process no more
_LEAVE_S = 1.0
_RANK_PROCESS = "tandem.worker.rank_process"
_decode_change = decoder(RoleChange, InvalidRequestError)


class Worker:
    """Engine, node, transfer group over the KV pool, queue and trace of one process.

    Its roles share them, and may change while it serves. Closing ends everything in an order that
    keeps the pool's memory valid while a peer may write to it.
    """

    def __init__(self, settings: WorkerSettings, role: WorkerRole) -> None:
        runtime, engine = settings.runtime, settings.engine
        if role == "decode":
            engine = engine.with_step_tokens(DECODE_STEP_TOKENS)
        self.settings = settings
        self.lifecycle = Lifecycle(drain_timeout_s=runtime.drain_timeout_s)
        self.engine = build_in_thread(partial(_build_engine, engine))
        runner = cast("ModelRunner | EmulatedRunner", self.engine.runner)  # see _runner
        self._emulated = runner if isinstance(runner, EmulatedRunner) else None
        self._followers = runner.followers
        self.node = node = Node(
            runtime,
            component=role,
            model=settings.model_name,
            progress=lambda: self.loop.progress,
            max_frame_bytes=MAX_FRAME_BYTES,
        )
        if self._followers is not None and self._followers.order_channels:
            node.rank_pids = self._followers.pids
        self.roles = Roles(node, self.lifecycle, role)
        self.loop = EngineLoop(
            self.engine,
            self.roles.on_outputs,
            on_device_lost=self._on_device_lost,
            check_device=runner.check_device,
        )
        confine_ucx(runtime.host, settings.transfer.port_range)
        self.group = self._transfer_group(self._followers)
        self.trace = TraceFile(runtime.trace_file, role, node.instance_id)
        self.weights_digest = weights_fingerprint(
            Path(engine.model), reads_weights=engine.emulate is None
        )
        self._kv_form = self.engine.runner.model_config.kv_form
        self.deployment = deployment_id(
            runtime.namespace,
            settings.model_name,
            self.weights_digest,
            self._kv_form,
            self.group.layout.digest(),
            settings.transfer.backend,
        )
        node.deployment = self.deployment
        node.max_prompt_tokens = self.engine.max_model_len - 1  # the first token is drawn there
        self.queue = JetStreamQueue(
            node.nats, settings.queue, runtime.namespace, settings.model_name, self.deployment
        )
        self.own_prompts = OwnPrompts()
        self.grammars = None  # an emulated device draws from all tokens: its card says so
        if self._emulated is None:
            self.grammars = _grammar_compiler(self.engine, Path(engine.model))
        self.last_load: LoadStats | None = None  # as it was reported
        self._load_subject = load_subject(runtime.namespace, node.instance_id)
        self._kernel_builds = KernelBuilds()
        self._metrics = WorkerMetrics(
            settings.model_name, self.engine.block_pool.block_size, settings.engine.tp
        )
        self._leaving: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    def _transfer_group(self, others: OtherRanks | None) -> TransferGroup:
        pools, node = self.engine.runner.kv_caches, self.node
        num_ranks = len(pools) + (len(others.order_channels) if others else 0)
        num_kv_heads = self.engine.runner.model_config.num_kv_heads
        layout = KvLayout.of(pools[0].tensor, num_kv_heads, num_ranks, pools[0].windows)
        parts = (self.settings.transfer, layout, pools, node.instance_id, node.epoch)
        if self._emulated is not None:
            return EmulatedGroup(self._emulated.profile, *parts)
        return TransferGroup(*parts, others)

    # ---- lifecycle ----------------------------------------------------------------------------

    async def run(self, *roles: Role) -> None:
        """Serve until a signal ends the process, at first in the worker's own role."""
        freeze_gc()
        await self.lifecycle.run(
            startup=partial(self.startup, *roles), drain=self.drain, stop=self.stop
        )

    async def startup(self, *roles: Role) -> None:
        """Join the cluster and take up the worker's own role; `roles` are all that it can have."""
        node, stack = self.node, self._stack
        await stack.enter_async_context(self.trace)  # closed last: it has all that ends before
        stack.push_async_callback(node.close)
        await node.connect()
        await self.loop.start()
        stack.push_async_callback(self.loop.stop)
        self._watch_ranks()
        stack.push_async_callback(self.group.close)
        await self.group.start(self.roles.on_notification)
        await self.queue.start()
        stack.push_async_callback(self.queue.close)
        if self.grammars is not None:
            stack.push_async_callback(self.grammars.close)
        if self.group.pool.memory == "VRAM":
            self._kernel_builds.count()
        node.server.register("status", self._status)
        node.server.register("change_role", self._change_role)
        node.server.register("control", Controls(self.loop, node.instance_id).serve)
        stack.push_async_callback(self.roles.close)
        await self.roles.begin(roles)
        reports = LoadReports(
            self.own_prompts, self._measured_load, self._send_load, lambda: self.loop.progress
        )
        stack.callback(keep_running("the report of the load", reports.send_next).cancel)
        logger.info("%s worker %s serves %s", self.role, node.instance_id, node.model)

    async def drain(self) -> None:
        """Take no new work, and wait for the work in hand."""
        await self.roles.drain()

    async def stop(self) -> None:
        """End everything; can be called after a `startup` that failed."""
        await self._stack.aclose()
        if self._emulated is not None:
            logger.info("emulated steps: %s", self._emulated.clock.summary())
        if self._followers is not None:
            await asyncio.to_thread(self._followers.close)

    async def matcher_of(
        self, grammar: Grammar | None, seq: Sequence, caller: str = ""
    ) -> Matcher | None:
        """Return the matcher of a request, which stands where the answer of `seq` does.

        None for a request without a grammar and without rules of tokens. Raises
        InvalidRequestError for a grammar that does not compile within its limits, or that the
        answer does not follow; OverloadedError where too many wait, or when those of `caller` cost
        too much.
        """
        answer, matcher = seq.token_ids[seq.num_prompt_tokens :], None
        if grammar is not None:
            if self.grammars is None:
                reason = "the model has no tokenizer for a grammar"
                raise InvalidRequestError(reason, param="grammar")
            matcher = await self.grammars.compile(grammar, answer, caller)
        allowed, bad_words = seq.sampling.allowed_token_ids, seq.sampling.bad_words
        if not allowed and not bad_words:
            return matcher
        vocab_size = self.engine.runner.model_config.vocab_size
        return TokenRules(allowed, bad_words, vocab_size, matcher, answer)

    # ---- roles --------------------------------------------------------------------------------

    @property
    def role(self) -> WorkerRole:
        """The role that the worker has now."""
        return self.roles.current

    async def _change_role(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        await self.roles.change(_decode_change(payload).role)
        answer.send(encode(await self._worker_status()))

    def _on_device_lost(self, error: DeviceLostError) -> None:
        if self._leaving is None:
            logger.critical("%s; the process ends", error.message)
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Leave discovery, and end the process: a new one can use the device again."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LEAVE_S):
                await self.node.withdraw()
        logging.shutdown()
        os._exit(EXIT_DEVICE_LOST)

    def _watch_ranks(self) -> None:
        """End this process when another rank of the model ends."""
        if self._followers is not None:
            loop = asyncio.get_running_loop()

            def notify(error: DeviceLostError) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and so does all else
                    loop.call_soon_threadsafe(self._on_device_lost, error)

            self._followers.listen(notify)

    # ---- status -------------------------------------------------------------------------------

    async def load(self) -> LoadStats:
        """Return the engine's load, read between two steps."""
        return await self.loop.call(lambda engine: engine.load())

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        answer.send(encode(await self._worker_status()))

    async def _worker_status(self) -> WorkerStatus:
        load = await self.load()
        details: Details = {
            "nats": self.node.nats.connected,
            "etcd": self.node.discovery.connected,
            "weights": self.weights_digest[:12],
            "kv_form": self._kv_form,
            "kv_layout": self.group.layout.describe(),
            "transport": self.settings.transfer.backend,
            "tp": self.settings.engine.tp,
        }
        details |= self.roles.details(load)
        if self._emulated is not None:
            clock = self._emulated.clock
            details |= {"late_share": clock.late_share, "worst_late_ms": clock.worst_late_s * 1e3}
        instance, state = self.roles.instance, self.lifecycle.state.value
        return WorkerStatus(instance, state, self._report(load), details, self.group.reports())

    async def _measured_load(self) -> LoadStats:
        self.last_load = load = await self.load()
        self._metrics.loaded(load)
        if self._followers is not None:
            self._metrics.waited(self._followers.rank.exchange.waited_s())
        if self._emulated is not None:
            clock = self._emulated.clock
            self._metrics.emulated(clock.late_share, clock.worst_late_s)
        self.roles.loaded(load)
        return load

    def _send_load(self, load: LoadStats) -> None:
        self.node.events.publish(self._load_subject, encode(self._report(load)))

    def _report(self, load: LoadStats) -> LoadReport:
        return load.report(self.node.instance_id, self.node.epoch, self.role)


def _runner(config: EngineConfig) -> "ModelRunner | EmulatedRunner":
    if config.emulate is not None:
        return EmulatedRunner(config)
    # Imported here: torch takes 220 MiB, and an emulated worker does without it.
    from tandem.engine.execution.model_runner import ModelRunner

    return ModelRunner(config, follower=_RANK_PROCESS)


def _build_engine(config: EngineConfig) -> Engine:
    engine = Engine(config, _runner(config))
    measure_costs(engine)
    return engine


def _grammar_compiler(engine: Engine, model: Path) -> GrammarCompiler | None:
    model_config = engine.runner.model_config
    return GrammarCompiler.of_model(model, model_config.vocab_size, model_config.eos_token_ids)
