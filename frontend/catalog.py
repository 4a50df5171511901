"""What can be served now: models, their decode workers and their tokenizers, from discovery."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import msgspec

from tandem.frontend.tokenizer import ModelText
from tandem.runtime.address import EndpointAddress
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import Discovery, TypedView, watch_models
from tandem.runtime.errors import NotFoundError, TandemError
from tandem.runtime.messages import Instance, ModelCard, ModelFiles
from tandem.runtime.request_plane import RequestClient

logger = logging.getLogger(__name__)

_FILES_TIMEOUT_S = 30.0
_RETRY_S = 0.5
_decode_files = msgspec.msgpack.Decoder(ModelFiles).decode


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A model under its name, with the workers that serve these very files."""

    card: ModelCard
    text: ModelText
    instances: dict[str, Instance] = field(default_factory=dict)  # by instance id


class Catalog:
    """Follows model cards and decode instances; fetches a model's files once per digest.

    Workers whose files differ from those in use under the same name get no requests until the
    last worker of the files in use is gone.
    """

    def __init__(
        self, discovery: Discovery, client: RequestClient, namespace: str, executor: Executor
    ) -> None:
        self._client = client
        self._executor = executor
        self._cards_view = watch_models(discovery, namespace)
        endpoint = EndpointAddress(namespace, "decode", "generate")
        self._instances_view = TypedView(discovery.watch(endpoint.key_prefix()), Instance)
        self._models: dict[str, ServedModel] = {}
        self._texts: dict[str, ModelText] = {}  # by files digest
        self._loads: dict[str, asyncio.Task[None]] = {}  # by files digest
        self._excluded_until_s: dict[str, float] = {}
        self.instances = self._instances_view.items
        self.on_instances: Callable[[], None] = lambda: None  # called after each change

    async def start(self) -> None:
        """Returns when the present state has been read; models may still be loading."""
        self._cards_view.subscribe(self._on_change)
        self._instances_view.subscribe(self._on_change)
        await self._cards_view.ready()
        await self._instances_view.ready()
        self._refresh()

    async def close(self) -> None:
        """Stop following."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        await self._cards_view.close()
        await self._instances_view.close()

    @property
    def models(self) -> list[ServedModel]:
        """All models that have a worker."""
        return [model for model in self._models.values() if model.instances]

    def get(self, name: str) -> ServedModel:
        """The model under this name, which may have no worker left. Raises NotFoundError."""
        model = self._models.get(name)
        if model is None:
            known = ", ".join(repr(each) for each in sorted(self._models)) or "none yet"
            raise NotFoundError(f"no model {name!r}; served: {known}", param="model")
        return model

    def candidates(self, model: ServedModel) -> list[str]:
        """Ids of the instances that a request for this model may go to now."""
        current = self._models.get(model.card.name, model)
        if not self._excluded_until_s:
            return list(current.instances)
        now = time.perf_counter()
        self._excluded_until_s = {k: v for k, v in self._excluded_until_s.items() if v > now}
        return [each for each in current.instances if each not in self._excluded_until_s]

    def exclude(self, instance_id: str, duration_s: float) -> None:
        """Send nothing to this instance for a while."""
        self._excluded_until_s[instance_id] = time.perf_counter() + duration_s

    def block_size(self, instance_id: str) -> int:
        """Tokens per block at this instance; 16 while its card is not known."""
        card = self._cards_view.items.get(instance_id)
        return card.block_size if card else 16

    def _on_change(self, _instance_id: str, _value: Instance | ModelCard | None) -> None:
        self._refresh()
        self.on_instances()

    def _refresh(self) -> None:
        """Recompute everything from the two views; they change rarely and are small."""
        cards = list(self._cards_view.items.values())
        live = [card for card in cards if card.instance_id in self.instances]
        by_name: dict[str, list[ModelCard]] = {}
        for card in live:
            by_name.setdefault(card.name, []).append(card)
        for name, model in list(self._models.items()):
            if name not in by_name:
                self._models[name] = ServedModel(model.card, model.text)
        for name, group in by_name.items():
            self._choose_files(name, group)
        digests = {card.files_digest for card in cards}
        used = digests | {model.card.files_digest for model in self._models.values()}
        self._texts = {digest: text for digest, text in self._texts.items() if digest in used}

    def _choose_files(self, name: str, cards: list[ModelCard]) -> None:
        digests = [card.files_digest for card in cards]
        in_use = self._models.get(name)
        digest = in_use.card.files_digest if in_use else digests[0]
        if digest not in digests:
            digest = max(set(digests), key=digests.count)
        text = self._texts.get(digest)
        if text is None:
            self._load(digest)
            return
        mine = [card for card in cards if card.files_digest == digest]
        if len(mine) < len(cards):
            logger.warning("model %s: %d workers have other files", name, len(cards) - len(mine))
        members = {card.instance_id: self.instances[card.instance_id] for card in mine}
        narrowest = min(mine, key=lambda card: card.context_length)
        self._models[name] = ServedModel(narrowest, text, members)

    def _load(self, digest: str) -> None:
        if digest not in self._loads:
            task = asyncio.get_running_loop().create_task(self._load_text(digest))
            self._loads[digest] = task

    async def _load_text(self, digest: str) -> None:
        """Fetch and parse the files of this digest from any worker that has them."""
        try:
            while holders := self._holders(digest):
                for instance in holders:
                    try:
                        self._texts[digest] = await self._fetch(instance)
                    except (TandemError, msgspec.MsgspecError) as error:
                        logger.warning("model files of %s: %s", instance.instance_id, error)
                    else:
                        return
                await asyncio.sleep(_RETRY_S)
        finally:
            del self._loads[digest]
            if digest in self._texts:
                self._refresh()

    def _holders(self, digest: str) -> list[Instance]:
        return [
            self.instances[card.instance_id]
            for card in self._cards_view.items.values()
            if card.files_digest == digest and card.instance_id in self.instances
        ]

    async def _fetch(self, instance: Instance) -> ModelText:
        async with RequestContext(timeout_s=_FILES_TIMEOUT_S) as context:
            answer = await self._client.call(instance.address, "model_files", b"", context)
        files = _decode_files(answer).files
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._executor, ModelText, files)
        logger.info("loaded the tokenizer of %s", instance.model)
        return text
