"""The stage before a decode engine: a prefill worker computes the prompt."""

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

# Errors that are not the prefill worker's: local prefill would not avoid them.
_FINAL = (CancelledRequestError, DeadlineError, InvalidRequestError)


class PrefillStage:
    """Calls of the prefill workers of the namespace, in turn."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def close(self) -> None:
        """Stop following the prefill workers."""
        await self._client.close()

    async def prepare(self, request: GenerateRequest, context: Context) -> GenerateRequest:
        """Return the request with a `prefill_result`, or unchanged if no prefill worker made one.

        Raise InvalidRequestError, DeadlineError and CancelledRequestError.
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
            logger.warning(
                "request %s continues without a remote prefill: %s", context.id(), error.message
            )
            return request
        logger.warning("request %s: the prefill worker sent no disaggregated_params", context.id())
        return request
