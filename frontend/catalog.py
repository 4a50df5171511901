"""The models that can be served now, their workers and tokenizers, from discovery."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import msgspec

from tandem.frontend.openai.errors import shown
from tandem.frontend.parsers.plain import PlainParser
from tandem.frontend.pieces import OutputParser
from tandem.frontend.text.body import Route
from tandem.frontend.tokens.tokenizer import ModelText
from tandem.frontend.variants import compatibility_key, narrowest, variant_in_force
from tandem.runtime.address import EndpointAddress
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import Discovery, TypedView, watch_endpoint, watch_models
from tandem.runtime.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.messages import Instance, ModelCard, ModelFiles
from tandem.runtime.model_files import MODEL_FILES_ENDPOINT
from tandem.runtime.plane.client import RequestClient

logger = logging.getLogger(__name__)

_PATHS: dict[str, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_FILES_TIMEOUT_S = 30.0
_RETRY_S = 0.5
_FIRST_LOAD_S = 5.0
_decode_files = msgspec.msgpack.Decoder(ModelFiles).decode


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A served model and the instances whose files, weights and routes match `card`."""

    card: ModelCard
    instances: dict[str, Instance]  # by instance id

    def check_route(self, route: Route) -> None:
        """Raise InvalidRequestError if the model is not served on this route."""
        if route in self.card.model_types:
            return
        served = " and ".join(_PATHS[each] for each in _PATHS if each in self.card.model_types)
        raise InvalidRequestError(
            f"model {self.card.name!r} is not served at {_PATHS[route]}, "
            f"but at {served or 'no path of this frontend'}",
            param="model",
        )


@dataclass(slots=True, frozen=True)
class TokenModel(ServedModel):
    """A model whose text the frontend turns into tokens and back."""

    text: ModelText

    @property
    def max_characters(self) -> int:
        """The characters of the longest prompt that may fit the context."""
        return self.card.context_length * self.text.longest_token

    def new_parser(self) -> OutputParser:
        """Return a parser of one chat choice, for the output format of the model."""
        return PlainParser()


class Catalog:
    """Follows the cluster's model cards, and the instances of every endpoint that a card names.

    A model's files are fetched once per digest. Of the workers that serve one name, only those of
    the variant in force get requests (see `variants`).
    """

    def __init__(
        self, discovery: Discovery, client: RequestClient, namespace: str, executor: Executor
    ) -> None:
        self._discovery = discovery
        self._client = client
        self._executor = executor
        self._cards_view = watch_models(discovery, namespace)
        self._endpoints: dict[str, TypedView[Instance]] = {}  # by a card's `endpoint`
        self._models: dict[str, ServedModel] = {}
        self._loading: set[str] = set()  # names whose workers are there, and their files not yet
        self._texts: dict[str, ModelText] = {}  # by files digest
        self._loads: dict[str, asyncio.Task[None]] = {}  # by files digest
        self._closings: set[asyncio.Task[None]] = set()  # of views that are not needed any more
        self._excluded_until_s: dict[str, float] = {}
        self._cards: dict[str, ModelCard] = {}  # by instance id, one of each
        self.instances: Mapping[str, Instance] = {}  # all that serve a model, by instance id
        self.has_text_models = False
        self._listeners: dict[object, Callable[[], None]] = {}

    async def start(self) -> None:
        """Read the present state of the cluster, and load its models for a few seconds."""
        self._cards_view.subscribe(self._on_card)
        await self._cards_view.ready()
        for view in list(self._endpoints.values()):
            await view.ready()
        if self._loads:
            await asyncio.wait(self._loads.values(), timeout=_FIRST_LOAD_S)

    async def close(self) -> None:
        """Stop following."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, *self._closings, return_exceptions=True)
        await self._cards_view.close()
        for view in self._endpoints.values():
            await view.close()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change of the workers. Returns a function that ends this."""
        key = object()
        self._listeners[key] = listener
        return lambda: self._listeners.pop(key, None) and None

    @property
    def models(self) -> list[ServedModel]:
        """All models that have a worker."""
        return [model for model in self._models.values() if model.instances]

    def reads_text(self, name: str) -> bool:
        """Return True if the model under this name reads and writes text itself."""
        model = self._models.get(name)
        return model is not None and not isinstance(model, TokenModel)

    def get(self, name: str) -> ServedModel:
        """Return the model under this name, which may have no worker left.

        Raises NotFoundError, UnavailableError while the model is being loaded.
        """
        model = self._models.get(name)
        if model is None and name in self._loading:
            raise UnavailableError(f"model {shown(name)!r} is being loaded")
        if model is None:
            known = ", ".join(repr(each) for each in sorted(self._models)) or "none yet"
            raise NotFoundError(f"no model {shown(name)!r}; served: {known}", param="model")
        return model

    def members(self, model: ServedModel) -> Mapping[str, Instance]:
        """Return the present instances of the variant of `model`, by instance id."""
        current = self._models.get(model.card.name, model)
        is_same = compatibility_key(current.card) == compatibility_key(model.card)
        return current.instances if is_same else {}

    def candidates(self, model: ServedModel) -> list[str]:
        """Return the ids of the instances that a request for this model may go to now."""
        members = self.members(model)
        if not self._excluded_until_s:
            return list(members)
        now = time.perf_counter()
        self._excluded_until_s = {k: v for k, v in self._excluded_until_s.items() if v > now}
        return [each for each in members if each not in self._excluded_until_s]

    def instance(self, model: ServedModel, instance_id: str) -> Instance | None:
        """Return this instance of the model; None once it has left."""
        return self.members(model).get(instance_id)

    def exclude(self, instance_id: str, duration_s: float) -> None:
        """Keep this instance out of `candidates` for a while."""
        self._excluded_until_s[instance_id] = time.perf_counter() + duration_s

    def block_size(self, instance_id: str) -> int:
        """Return the tokens per block at this instance; 16 while its card is not known."""
        card = self._cards.get(instance_id)
        return card.block_size if card else 16

    def sends_kv_events(self, instance_id: str) -> bool:
        """Return True if the instance publishes the contents of its prefix cache."""
        card = self._cards.get(instance_id)
        return card is not None and card.sends_kv_events

    def _on_card(self, _name: str, _card: ModelCard | None) -> None:
        self._follow_endpoints()
        self._on_change()

    def _on_instance(self, _instance_id: str, _instance: Instance | None) -> None:
        self._on_change()

    def _on_change(self) -> None:
        self._refresh()
        for listener in list(self._listeners.values()):
            listener()

    def _follow_endpoints(self) -> None:
        named = {card.endpoint for card in self._cards_view.items.values()}
        for endpoint in named - self._endpoints.keys():
            try:
                address = EndpointAddress.parse(endpoint)
            except ConfigError as error:
                logger.warning("ignored a model card: %s", error)
                continue
            self._endpoints[endpoint] = watch_endpoint(self._discovery, address)
            self._endpoints[endpoint].subscribe(self._on_instance)
        for endpoint in self._endpoints.keys() - named:
            view = self._endpoints.pop(endpoint)
            closing = asyncio.get_running_loop().create_task(view.close())
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)

    def _instance_of(self, card: ModelCard) -> Instance | None:
        view = self._endpoints.get(card.endpoint)
        return view.items.get(card.instance_id) if view else None

    def _refresh(self) -> None:
        """Compute everything anew from the views, which are small and change rarely."""
        cards = list(self._cards_view.items.values())
        instances: dict[str, Instance] = {}
        by_name: dict[str, list[ModelCard]] = {}
        self._cards = {}
        for card in cards:
            instance = self._instance_of(card)
            if instance is not None:
                instances[card.instance_id] = instance
                by_name.setdefault(card.name, []).append(card)
                if card.sends_kv_events or card.instance_id not in self._cards:
                    self._cards[card.instance_id] = card
        self.instances = instances
        for name, model in list(self._models.items()):
            if name not in by_name:
                self._models[name] = replace(model, instances={})
        for name, group in by_name.items():
            self._update_model(name, group)
        self._loading = by_name.keys() - self._models.keys()
        self.has_text_models = any(map(self.reads_text, self._models))
        digests = {card.files_digest for card in cards}
        used = digests | {model.card.files_digest for model in self._models.values()}
        self._texts = {digest: text for digest, text in self._texts.items() if digest in used}

    def _update_model(self, name: str, cards: list[ModelCard]) -> None:
        present = self._models.get(name)
        members = variant_in_force(cards, present.card if present else None)
        card = narrowest(members)
        if len(members) < len(cards):
            num_others = len(cards) - len(members)
            logger.warning("model %s: %d workers serve another variant", name, num_others)
        instances = {
            member.instance_id: instance
            for member in members
            if (instance := self._instance_of(member))
        }
        if card.model_input == "text":
            self._models[name] = ServedModel(card, instances)
        elif text := self._texts.get(card.files_digest):
            self._models[name] = TokenModel(card, instances, text)
        else:
            if present is not None:
                self._models[name] = replace(present, instances={})
            self._load(card.files_digest)

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
                        self._texts[digest] = await self._fetch(instance, digest)
                    except (TandemError, msgspec.MsgspecError) as error:
                        logger.warning("model files of %s: %s", instance.instance_id, error)
                    else:
                        return
                await asyncio.sleep(_RETRY_S)
        finally:
            del self._loads[digest]
            if digest in self._texts:
                self._on_change()

    def _holders(self, digest: str) -> list[Instance]:
        return [
            instance
            for card in self._cards_view.items.values()
            if card.files_digest == digest and (instance := self._instance_of(card))
        ]

    async def _fetch(self, instance: Instance, digest: str) -> ModelText:
        async with RequestContext(timeout_s=_FILES_TIMEOUT_S) as context:
            answer = await self._client.call(
                instance.address, MODEL_FILES_ENDPOINT, digest.encode(), context
            )
        files = _decode_files(answer).files
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._executor, ModelText, files)
        logger.info("loaded the tokenizer with digest %s from %s", digest, instance.instance_id)
        return text
