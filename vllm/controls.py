"""An operator's commands on a vLLM engine: sleep, prefix cache, profiles; without vLLM's import."""

import asyncio
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tandem.runtime.errors import InvalidRequestError
from tandem.sdk.exceptions import WorkerUnavailable
from tandem.sdk.worker.distributed_runtime import Endpoint

_OF_VLLM = {"reset_prefix_cache", "start_profile", "stop_profile"}
CONTROLS = {"sleep", "wake_up", "is_sleeping"} | _OF_VLLM
Body = TypeVar("Body", bound=msgspec.Struct)


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Sleep(msgspec.Struct, forbid_unknown_fields=True):
    level: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    mode: Literal["abort", "wait"] = "abort"  # with running answers


class _WakeUp(msgspec.Struct, forbid_unknown_fields=True):
    tags: list[Literal["weights", "kv_cache"]] | None = None


class Controls:
    """Runs commands on an `AsyncLLM`. An engine that sleeps is not in discovery."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self._is_asleep = False
        self._turn = asyncio.Lock()

    def check_awake(self) -> None:
        """Raise WorkerUnavailable while vLLM sleeps, so that callers go to another worker."""
        if self._is_asleep:
            raise WorkerUnavailable("vLLM sleeps")

    async def run(self, llm: Any, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Run one of CONTROLS. Raise InvalidRequestError for a body that it does not take."""
        async with self._turn:
            if name == "sleep":
                return await self._sleep(llm, _read(name, body, _Sleep))
            if name == "wake_up":
                return await self._wake_up(llm, _read(name, body, _WakeUp))
            _read(name, body, _Nothing)
            if name in _OF_VLLM:
                await getattr(llm, name)()
            return self._state()

    async def _sleep(self, llm: Any, wanted: _Sleep) -> dict[str, Any]:
        config = llm.vllm_config
        if config.kv_transfer_config is not None:
            raise InvalidRequestError(
                "sleep: another worker may write into the KV cache of a worker with a connector",
                param="name",
            )
        if wanted.level > 0 and not config.model_config.enable_sleep_mode:
            raise InvalidRequestError(
                "sleep: level 1 needs --enable-sleep-mode; level 0 pauses and frees no memory",
                param="level",
            )
        if self.endpoint is not None:
            await self.endpoint.withdraw()
        self._is_asleep = True  # until `wake_up`, also where vLLM fails now
        await llm.sleep(wanted.level, wanted.mode)
        return self._state()

    async def _wake_up(self, llm: Any, wanted: _WakeUp) -> dict[str, Any]:
        if await llm.wake_up(wanted.tags) and self._is_asleep:
            self._is_asleep = False
            if self.endpoint is not None:
                await self.endpoint.register()
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {"status": "ok", "is_sleeping": self._is_asleep}


def _read(name: str, body: dict[str, Any], kind: type[Body]) -> Body:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{name}: {error}", param="body") from error
