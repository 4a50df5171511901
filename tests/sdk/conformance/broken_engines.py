"""An honest engine, and one for every rule of the contract, which breaks that rule alone."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any, Self

from tandem.sdk.conformance.errors import Failure
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.types import EngineConfig, GenerateChunk, GenerateRequest
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.models import ModelInput

NUM_SEATS = 3
Answer = AsyncGenerator[GenerateChunk, None]


def last(request: GenerateRequest, num_tokens: int, reason: str, *, is_cut: bool) -> GenerateChunk:
    """The last chunk; without a token of its own where the answer was cut."""
    num_prompt = len(request["token_ids"])
    return {
        "token_ids": [] if is_cut else [num_tokens],
        "index": 0,
        "finish_reason": reason,
        "completion_usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        },
    }


BROKEN: dict[type["HonestEngine"], Failure] = {}  # engine |-> the failure of its rule


class HonestEngine(LLMEngine):
    """Counts; has few seats, so that one which is not given back is missed."""

    mode = DisaggregationMode.AGGREGATED

    def __init_subclass__(cls, breaks: Failure | None = None) -> None:
        if breaks is not None:
            BROKEN[cls] = breaks

    def __init__(self) -> None:
        self.seats: asyncio.Semaphore | None = None
        self.seated: set[str] = set()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        return cls(), WorkerConfig("honest", model_name="honest", disaggregation_mode=cls.mode)

    async def start(self, worker_id: int) -> EngineConfig:
        await asyncio.sleep(0)
        self.seats = asyncio.Semaphore(NUM_SEATS)
        return EngineConfig(model="honest", context_length=4096, max_num_seqs=NUM_SEATS)

    async def generate(self, request: GenerateRequest, context: Context) -> Answer:
        assert self.seats is not None
        await self.seats.acquire()
        self.seated.add(context.id())
        try:
            async for chunk in self.count(request, context):
                self.alter(chunk, request)
                yield chunk
        finally:
            self.give_back(context)

    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        """Break a chunk, or leave it as it is."""

    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        max_tokens = request["stop_conditions"]["max_tokens"]
        for number in range(1, max_tokens + 1):
            await asyncio.sleep(0)
            if context.is_stopped():
                yield last(request, number - 1, "cancelled", is_cut=True)
                return
            if number == max_tokens:
                yield last(request, number, "length", is_cut=False)
            else:
                yield {"token_ids": [number], "index": 0}

    def give_back(self, context: Context) -> None:
        assert self.seats is not None
        if context.id() in self.seated:
            self.seated.remove(context.id())
            self.seats.release()

    async def is_quiescent(self) -> bool | None:
        return not self.seated

    async def cleanup(self) -> None:
        self.seats = None


class TextEngine(HonestEngine):
    """Reads messages and yields words; counts tokens in words."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        return cls(), WorkerConfig("honest", model_name="honest", model_input=ModelInput.Text)

    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        words = len(request["messages"][0]["content"].split())
        async for chunk in super().count(request, context):
            usage = chunk.get("completion_usage")
            if usage is not None:
                usage["prompt_tokens"] = words
                usage["total_tokens"] += words
            answer: GenerateChunk = {**chunk, "text": "word " * len(chunk["token_ids"])}
            answer.pop("token_ids")  # type: ignore[misc]
            yield answer


# ---- start ------------------------------------------------------------------------------------


class FailsToStart(HonestEngine, breaks=Failure.StartFailed):
    async def start(self, worker_id: int) -> EngineConfig:
        await super().start(worker_id)
        raise OSError("no such weights")


class ForgetsItsModel(HonestEngine, breaks=Failure.EmptyModelInConfig):
    async def start(self, worker_id: int) -> EngineConfig:
        await super().start(worker_id)
        return EngineConfig(model=" ")


class HasNoContext(HonestEngine, breaks=Failure.WrongConfigValue):
    async def start(self, worker_id: int) -> EngineConfig:
        await super().start(worker_id)
        return EngineConfig(model="honest", context_length=0)


# ---- generate ---------------------------------------------------------------------------------


class Raises(HonestEngine, breaks=Failure.GenerateFailed):
    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        yield {"token_ids": [1], "index": 0}
        raise GeneratorExit("not today")


class SaysNothing(HonestEngine, breaks=Failure.NoChunksYielded):
    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        return
        yield


class YieldsTensors(HonestEngine, breaks=Failure.MalformedChunk):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        chunk["token_ids"] = tuple(chunk["token_ids"])  # type: ignore[typeddict-item]


class InventsAFinishReason(HonestEngine, breaks=Failure.UnknownFinishReason):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        if "finish_reason" in chunk:
            chunk["finish_reason"] = "done"


class NeverSaysTheEnd(HonestEngine, breaks=Failure.NoTerminalChunk):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        chunk.pop("finish_reason", None)


class GoesOnAfterTheEnd(HonestEngine, breaks=Failure.ChunkAfterTerminal):
    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        async for chunk in super().count(request, context):
            yield chunk
        yield {"token_ids": [], "index": 0}


class ForgetsUsage(HonestEngine, breaks=Failure.TerminalMissingUsage):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        chunk.pop("completion_usage", None)


class MiscountsTokens(HonestEngine, breaks=Failure.UsageDoesNotAddUp):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        if "completion_usage" in chunk:
            chunk["completion_usage"]["completion_tokens"] -= 1
            chunk["completion_usage"]["total_tokens"] -= 1


class MiscountsTheSum(HonestEngine, breaks=Failure.UsageDoesNotAddUp):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        if "completion_usage" in chunk:
            chunk["completion_usage"]["total_tokens"] += 1


class SaysTooMuch(HonestEngine, breaks=Failure.MaxTokensExceeded):
    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        request["stop_conditions"] = {"max_tokens": request["stop_conditions"]["max_tokens"] + 1}
        async for chunk in super().count(request, context):
            yield chunk


class TiresEarly(HonestEngine, breaks=Failure.AnswerTooShort):
    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        few = GenerateRequest(**request)
        few["stop_conditions"] = {"max_tokens": min(4, request["stop_conditions"]["max_tokens"])}
        async for chunk in super().count(few, context):
            yield chunk


class MisalignsLogprobs(HonestEngine, breaks=Failure.LogprobsMisaligned):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        if "logprobs" in request.get("output_options", {}):
            chunk["log_probs"] = [-0.5, -0.5]


class ForgetsTheHandoff(HonestEngine, breaks=Failure.PrefillParamsMissing):
    mode = DisaggregationMode.PREFILL


class MixesAnswersUp(HonestEngine, breaks=Failure.ConcurrentGenerateFailed):
    """Keeps the request it works on in the engine, where the next one overwrites it."""

    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        self.current = request
        number = 0
        while not context.is_stopped():
            number += 1
            await asyncio.sleep(0)
            if number >= self.current["stop_conditions"]["max_tokens"]:
                yield last(self.current, number, "length", is_cut=False)
                return
            yield {"token_ids": [number], "index": 0}
        yield last(self.current, number, "cancelled", is_cut=True)


class FailsItsOwnProbe(HonestEngine, breaks=Failure.HealthCheckFailed):
    async def health_check_payload(self) -> dict[str, Any] | None:
        return {"token_ids": [1], "stop_conditions": {}}  # this engine needs max_tokens


# ---- cancellation -----------------------------------------------------------------------------


class NeverLooksUp(HonestEngine, breaks=Failure.CancellationIgnored):
    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        async for chunk in super().count(request, Context()):
            await asyncio.sleep(0.005)
            yield chunk


class CallsItStopped(HonestEngine, breaks=Failure.CancellationNotObserved):
    def alter(self, chunk: GenerateChunk, request: GenerateRequest) -> None:
        if chunk.get("finish_reason") == "cancelled":
            chunk["finish_reason"] = "stop"


class AbortsOnlyWhatRuns(HonestEngine, breaks=Failure.AbortFailed):
    async def abort(self, context: Context) -> None:
        self.seated.remove(context.id())
        assert self.seats is not None
        self.seats.release()


class ForgetsWhomItAborts(HonestEngine, breaks=Failure.AbortLeaked):
    async def abort(self, context: Context) -> None:
        self.seated.discard(context.id())  # and leaks the seat


class TalksWhenClosed(HonestEngine, breaks=Failure.DropFailed):
    async def generate(self, request: GenerateRequest, context: Context) -> Answer:
        try:
            async for chunk in super().generate(request, context):
                yield chunk
        except GeneratorExit:
            self.give_back(context)
            if not context.is_killed():
                yield last(request, 0, "cancelled", is_cut=True)


class LeavesSeatsToAbort(HonestEngine, breaks=Failure.DropLeaked):
    async def generate(self, request: GenerateRequest, context: Context) -> Answer:
        assert self.seats is not None
        await self.seats.acquire()
        self.seated.add(context.id())
        async for chunk in self.count(request, context):
            yield chunk
        self.give_back(context)

    async def abort(self, context: Context) -> None:
        self.give_back(context)


# ---- the end ----------------------------------------------------------------------------------


class FailsToDrain(HonestEngine, breaks=Failure.DrainFailed):
    async def drain(self) -> None:
        assert not self.seated, "somebody still sits here"


class DrainsByCutting(HonestEngine, breaks=Failure.DrainCutStream):
    is_cut = False

    async def count(self, request: GenerateRequest, context: Context) -> Answer:
        async for chunk in super().count(request, context):
            if self.is_cut:
                return
            yield chunk

    async def drain(self) -> None:
        self.is_cut = True


class NeverComesToRest(HonestEngine, breaks=Failure.NotQuiescent):
    is_draining = False

    async def drain(self) -> None:
        self.is_draining = True

    async def is_quiescent(self) -> bool | None:
        return not self.is_draining


class CannotEndUnstarted(HonestEngine, breaks=Failure.CleanupWithoutStartFailed):
    async def start(self, worker_id: int) -> EngineConfig:
        self.seats = asyncio.Semaphore(NUM_SEATS)
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        self.seats.release()  # type: ignore[union-attr]


class CannotEndHalfStarted(HonestEngine, breaks=Failure.PartialStartCleanupFailed):
    is_loading = False
    weights: list[int] | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        self.is_loading = True
        config = await super().start(worker_id)
        self.weights = [1]
        return config

    async def cleanup(self) -> None:
        if self.is_loading:
            self.weights.clear()  # type: ignore[union-attr]


class FailsToClean(HonestEngine, breaks=Failure.CleanupFailed):
    async def cleanup(self) -> None:
        if self.seats is not None:
            await super().cleanup()
            raise OSError("the device is busy")


class CleansTwice(HonestEngine, breaks=Failure.SecondCleanupFailed):
    is_clean = False

    async def cleanup(self) -> None:
        if self.seats is not None:
            assert not self.is_clean, "cleaned already"
            self.is_clean = True


class LeavesATask(HonestEngine, breaks=Failure.TasksLeaked):
    task: asyncio.Task[None] | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        self.task = asyncio.create_task(self.schedule())
        return config

    async def schedule(self) -> None:
        await asyncio.Event().wait()


class LeavesAThread(HonestEngine, breaks=Failure.ThreadsLeaked):
    released = threading.Event()  # for the test, which wants to end

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        self.released.clear()
        threading.Thread(target=self.released.wait, name="publisher").start()
        return config
