"""What comes before a decode engine: a prefill worker is asked to compute the prompt."""

import logging

from tandem.runtime.errors import (
    CancelledRequestError,
    DeadlineError,
    InvalidRequestError,
    TandemError,
)
from tandem.sdk.engine.types import GenerateRequest
from tandem.sdk.worker.client import Client
from tandem.sdk.worker.context import Context

logger = logging.getLogger(__name__)

# The caller's own doing: no other way of computing the prompt would change them.
_FINAL = (CancelledRequestError, DeadlineError, InvalidRequestError)


class PrefillStage:
    """Asks the prefill workers of the namespace in turn."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def close(self) -> None:
        """Stops following the prefill workers."""
        await self._client.close()

    async def prepare(self, request: GenerateRequest, context: Context) -> GenerateRequest:
        """The request with a `prefill_result`; as it was when no prefill worker made one.

        Raises what the request itself is at fault for, and the caller's going away.
        """
        if not self._client.instance_ids():
            return request
        stop = {**(request.get("stop_conditions") or {}), "max_tokens": 1, "min_tokens": 0}
        try:
            answer = await self._client.round_robin(
                {**request, "stop_conditions": stop}, annotated=False, context=context
            )
            async with answer:
                async for chunk in answer:
                    if (params := chunk.get("disaggregated_params")) is not None:
                        return {**request, "prefill_result": {"disaggregated_params": params}}
        except _FINAL:
            raise
        except TandemError as error:
            logger.warning("request %s goes on without a prefill: %s", context.id(), error.message)
            return request
        logger.warning("request %s: the prefill worker left no parameters", context.id())
        return request
