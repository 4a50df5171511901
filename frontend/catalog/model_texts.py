"""The tokenizers and chat templates of models, fetched from the workers by the files' digest."""

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from tandem.frontend.tokens.tokenizer import ModelText
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ModelError, ProtocolError
from tandem.runtime.membership.model_files import MODEL_FILES_ENDPOINT, files_digest
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import ModelFiles

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 30.0
_RETRY_S = 0.5
_NUM_READERS = 4  # models whose files are read at one time
_MAX_FILES_BYTES = 48 * 1024 * 1024  # the largest tokenizers have 35 MiB
_decode_files = decoder(ModelFiles)


class ModelTexts:
    """The texts of models by digest. Each is fetched once, from any worker that `holders` names."""

    def __init__(
        self,
        client: RequestClient,
        holders: Callable[[str], list[Instance]],
        on_loaded: Callable[[], None],
    ) -> None:
        self._client = client
        self._readers = ThreadPoolExecutor(_NUM_READERS, "model-files")
        self._holders = holders
        self._on_loaded = on_loaded
        self._texts: dict[str, ModelText] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}

    def get(self, digest: str) -> ModelText | None:
        """Return the text with this digest. None if it is not loaded, and then it will be."""
        text = self._texts.get(digest)
        if text is None and digest not in self._loads:
            self._loads[digest] = asyncio.get_running_loop().create_task(self._load(digest))
        return text

    def keep(self, digests: Collection[str]) -> None:
        """Forget all texts but these."""
        self._texts = {digest: text for digest, text in self._texts.items() if digest in digests}

    async def wait_for_loads(self, timeout_s: float) -> None:
        """Wait until everything is loaded that is being loaded now, or the time is up."""
        if self._loads:
            await asyncio.wait(self._loads.values(), timeout=timeout_s)

    async def close(self) -> None:
        """End the loads under way, and whatever waits for a thread."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        for threads in (self._readers, *(text.threads for text in self._texts.values())):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, digest: str) -> None:
        try:
            while digest not in self._texts and (holders := self._holders(digest)):
                await self._load_from(holders, digest)
        finally:
            del self._loads[digest]
            if digest in self._texts:
                self._on_loaded()

    async def _load_from(self, holders: list[Instance], digest: str) -> None:
        """Try one holder after another. Returns after a pause if none has the files."""
        for instance in holders:
            try:
                self._texts[digest] = await self._fetch(instance, digest)
            except Exception as error:  # whatever a worker sends, the next one may be right
                logger.warning("model files of %s: %s", instance.instance_id, error)
            else:
                logger.info("loaded the tokenizer %s from %s", digest, instance.instance_id)
                return
        await asyncio.sleep(_RETRY_S)

    async def _fetch(self, instance: Instance, digest: str) -> ModelText:
        async with RequestContext(timeout_s=_FETCH_TIMEOUT_S) as context:
            answer = await self._client.call(
                instance.address, MODEL_FILES_ENDPOINT, digest.encode(), context
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, _read, answer, digest)


def _read(answer: bytes, digest: str) -> ModelText:
    """Return the text of the files that a worker sent. Raises ProtocolError for other files."""
    if len(answer) > _MAX_FILES_BYTES:
        raise ModelError(f"the files have {len(answer)} bytes, the most is {_MAX_FILES_BYTES}")
    model_files = _decode_files(answer)
    sent = files_digest(model_files)
    if sent != digest:
        raise ProtocolError(f"sent files with the digest {sent} for {digest}")
    return ModelText(model_files.files)
