"""The stage before a decode engine: a prefill worker computes the prompt, or the engine does."""

import logging
from contextlib import AsyncExitStack

from tandem.router.by_cost import MARGIN
from tandem.router.config import RouterConfig
from tandem.router.decision import RoutingDecision
from tandem.router.policy import Router
from tandem.runtime.bus.events import Events, load_subject
from tandem.runtime.errors import ProtocolError, TandemError, UnavailableError
from tandem.runtime.wire.cluster_messages import LoadReport
from tandem.runtime.wire.decoding import RefusalLog, decoder
from tandem.sdk.engine.types import GenerateRequest
from tandem.sdk.engine_worker.overlap import FINAL, PrefillLeg, meeting
from tandem.sdk.worker.client import Client, Responses
from tandem.sdk.worker.context import Context

logger = logging.getLogger(__name__)

_decode_load = decoder(LoadReport)
_refusals = RefusalLog(logger, "a load report")


class PrefillStage:
    """The place of each prompt: this engine, or a prefill worker of the namespace.

    An engine that reports its step costs computes a prompt itself unless a prefill worker is
    predicted to delay all answers less. Any other engine calls the prefill workers in turn.
    """

    def __init__(self, client: Client, instance_id: str) -> None:
        self._client = client
        self._here = instance_id
        # Prompts are placed without their prefixes, so a block of the router is a token here.
        self._router = Router(RouterConfig())
        self._known: set[str] = set()  # prefill workers that have reported
        self._legs: dict[str, PrefillLeg] = {}  # request id |-> until it is taken
        self._num_calls = 0
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(client.close)

    async def start(self, events: Events, namespace: str) -> None:
        """Follow the load of this engine and of the prefill workers."""
        unsubscribe = await events.subscribe(load_subject(namespace), self._on_load)
        self._stack.push_async_callback(unsubscribe)

    async def close(self) -> None:
        """Stop following the prefill workers."""
        await self._stack.aclose()

    async def prepare(self, request: GenerateRequest, context: Context) -> GenerateRequest:
        """Return the request with a `prefill_result`, or unchanged if no prefill worker made one.

        A request with `bootstrap_info` has a leg at a prefill worker, which `take_leg` returns.

        Raise InvalidRequestError, DeadlineError and CancelledRequestError.
        """
        if request.get("images"):  # they are no part of what a prefill worker is asked
            return request
        if not self._fitting(self._client.available_ids(), len(request["token_ids"])):
            return request
        decision = self.decide(len(request["token_ids"]))
        if decision is not None:
            is_here = decision.instance_id == self._here
            place = "here" if is_here else decision.instance_id
            logger.debug(
                "request %s: prompt computed at %s: %s", context.id(), place, decision.reason
            )
            if is_here:
                self._started(context, decision, len(request["token_ids"]))
                return request
        if (met := self._begin_leg(request, context, decision)) is not None:
            return met
        try:
            return await self._prefilled(request, context, in_turn=decision is None)
        finally:
            self._router.finished(context.id())

    def take_leg(self, context: Context) -> PrefillLeg | None:
        """Return the prefill that runs beside a request; the caller ends it."""
        return self._legs.pop(context.id(), None)

    def decide(self, num_tokens: int) -> RoutingDecision | None:
        """Return the place of a prompt. None where this engine's costs are not known."""
        here = self._router.choose([self._here], [], num_tokens)
        if not here.predicted_ms or not num_tokens:
            return None
        fitting = self._fitting(self._client.available_ids(), num_tokens)
        there = self._router.choose(fitting, [], num_tokens)
        is_cheaper = there.cost_ms < here.cost_ms * (1 - MARGIN)
        return there if there.predicted_ms and is_cheaper else here

    def begun(self, context: Context) -> None:
        """Note that this engine has computed the prompt of a request."""
        self._router.prefilled(context.id())

    def ended(self, context: Context) -> None:
        """Note that a request is over."""
        if (leg := self.take_leg(context)) is not None:
            leg.end(at_once=True)
        self._router.finished(context.id())

    def _fitting(self, instance_ids: list[str], num_tokens: int) -> list[str]:
        """Return the instances whose context holds a prompt of so many tokens."""
        limits = {each.instance_id: each.max_prompt_tokens for each in self._client.instances()}
        return [each for each in instance_ids if not 0 < limits.get(each, 0) < num_tokens]

    def _started(self, context: Context, decision: RoutingDecision, num_tokens: int) -> None:
        self._router.finished(context.id())
        self._router.started(context.id(), decision, num_tokens)

    def _begin_leg(
        self, request: GenerateRequest, context: Context, decision: RoutingDecision | None
    ) -> GenerateRequest | None:
        """Return the request with the place where it meets its prefill, which has begun.

        None where the chosen prefill worker has no such place.
        """
        available = self._fitting(self._client.available_ids(), len(request["token_ids"]))
        chosen = decision.instance_id if decision else self._next_of(available)
        addresses = {each.instance_id: each.bootstrap for each in self._client.instances()}
        if (address := addresses.get(chosen)) is None:
            return None
        self._num_calls += 1
        met: GenerateRequest = {**request, "bootstrap_info": meeting(address)}
        if decision is not None:
            self._started(context, decision, len(request["token_ids"]))

        async def work() -> None:
            answer = await self._client.direct(_prompt_of(met), chosen, False, context)
            try:
                async with answer:
                    async for _ in answer:
                        pass
            finally:
                self._router.finished(context.id())

        self._legs[context.id()] = PrefillLeg(context.id(), work())
        return met

    async def _prefilled(
        self, request: GenerateRequest, context: Context, *, in_turn: bool
    ) -> GenerateRequest:
        try:
            answer = await self._call(_prompt_of(request), context, in_turn=in_turn)
            async with answer:
                async for chunk in answer:
                    if (params := chunk.get("disaggregated_params")) is not None:
                        return {**request, "prefill_result": {"disaggregated_params": params}}
        except FINAL:
            raise
        except TandemError as error:
            logger.warning(
                "request %s continues without a remote prefill: %s", context.id(), error.message
            )
            return request
        logger.warning("request %s: the prefill worker sent no disaggregated_params", context.id())
        return request

    async def _call(self, prompt: GenerateRequest, context: Context, *, in_turn: bool) -> Responses:
        """Call a prefill worker: the next one, or the one with the least predicted delay."""
        num_tokens = len(prompt["token_ids"])

        def choose(instance_ids: list[str]) -> str:
            fitting = self._fitting(instance_ids, num_tokens)
            if not fitting:
                raise UnavailableError(f"no prefill worker is left for {num_tokens} tokens")
            if in_turn:
                self._num_calls += 1
                return self._next_of(fitting)
            decision = self._router.choose(fitting, [], num_tokens)
            self._started(context, decision, num_tokens)
            return decision.instance_id

        return await self._client.chosen(prompt, choose, annotated=False, context=context)

    def _next_of(self, instance_ids: list[str]) -> str:
        return instance_ids[self._num_calls % len(instance_ids)]

    def _on_load(self, subject: str, payload: bytes) -> None:
        """Note a report of this engine or of a prefill worker; forget those that have left."""
        present = set(self._client.instance_ids())
        for gone in self._known - present:
            self._router.remove_instance(gone)
        self._known &= present
        instance_id = subject.rpartition(".")[2]
        if instance_id != self._here and instance_id not in present:
            return
        try:
            report = _decode_load(payload)
        except ProtocolError as error:
            _refusals.note(instance_id, error)
            return
        if report.instance_id == instance_id:
            if instance_id != self._here:
                self._known.add(instance_id)
            self._router.update_load(report, block_size=1)


def _prompt_of(request: GenerateRequest) -> GenerateRequest:
    """Return the request of the prefill worker: the same prompt, one token."""
    stop = {**(request.get("stop_conditions") or {}), "max_tokens": 1, "min_tokens": 0}
    return {**request, "stop_conditions": stop}
