"""The models that can be served now, their workers and tokenizers, from discovery."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tandem.frontend.bodies.outline import MAX_PROMPT_TOKENS
from tandem.frontend.catalog.lost_workers import LostWorkers
from tandem.frontend.catalog.model_texts import ModelTexts
from tandem.frontend.catalog.variants import (
    agreeing,
    compatibility_key,
    fault_of,
    narrowest,
    variant_in_force,
)
from tandem.frontend.tokens.tokenizer import ModelText
from tandem.runtime.address import EndpointAddress
from tandem.runtime.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.printable import short
from tandem.runtime.store.discovery import Discovery, TypedView, watch_endpoint, watch_models
from tandem.runtime.wire.cluster_messages import Instance, ModelCard

logger = logging.getLogger(__name__)

ModelRoute = Literal["chat", "completions", "embeddings", "rerank"]
_PATHS: dict[str, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank and /v1/score",
}
_FIRST_LOAD_S = 5.0


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A served model and the instances whose files, weights and routes match `card`."""

    card: ModelCard
    instances: dict[str, Instance]  # by instance id

    def check_route(self, route: ModelRoute) -> None:
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


class Catalog:
    """Follows the cluster's model cards, and the instances of every endpoint that a card names.

    A model's files are fetched once per digest. Of the workers that serve one name, only those of
    the variant in force get requests (see `variants`).
    """

    def __init__(
        self,
        discovery: Discovery,
        client: RequestClient,
        namespace: str,
        model_grace_s: float,
    ) -> None:
        self._discovery = discovery
        self._client = client
        self._model_grace_s = model_grace_s
        self._cards_view = watch_models(discovery, namespace)
        self._endpoints: dict[str, TypedView[Instance]] = {}  # by a card's `endpoint`
        self._models: dict[str, ServedModel] = {}
        self._loading: set[str] = (
            set()
        )  # names with a card, whose worker or files are not there yet
        self._started_s = time.perf_counter()
        self._texts = ModelTexts(client, self._holders, self._on_change)
        self._departures: dict[str, asyncio.TimerHandle] = {}  # of models without a worker
        self._closings: set[asyncio.Task[None]] = set()  # of views that are not needed any more
        self._lost = LostWorkers(client, self._is_worker, self._on_change)
        self._absent_since_s: dict[str, float] = {}  # by name, of models that no worker serves now
        self._excluded_until_s: dict[str, float] = {}
        self._cards: dict[str, ModelCard] = {}  # by instance id, one of each
        self.instances: Mapping[str, Instance] = {}  # all that serve a model, by instance id
        self.has_text_models = False
        self.longest_context = MAX_PROMPT_TOKENS  # of all models, in tokens
        self._listeners: dict[object, Callable[[], None]] = {}

    async def start(self) -> None:
        """Read the present state of the cluster, and load its models for a few seconds."""
        self._cards_view.subscribe(self._on_card)
        await self._cards_view.ready()
        for view in list(self._endpoints.values()):
            await view.ready()
        await self._texts.wait_for_loads(_FIRST_LOAD_S)

    async def close(self) -> None:
        """Stop following."""
        for departure in self._departures.values():
            departure.cancel()
        await self._texts.close()
        await self._lost.close()
        await asyncio.gather(*self._closings, return_exceptions=True)
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

    def sees_images(self, name: str) -> bool:
        """Return True if all workers of this model take images beside the tokens."""
        model = self._models.get(name)
        return isinstance(model, TokenModel) and model.card.supports_images

    def get(self, name: str) -> ServedModel:
        """Return the model under this name, which may have no worker left.

        Raises NotFoundError, UnavailableError while the model is being loaded, or may be: one
        without a worker would be known for as long as this frontend has run.
        """
        model = self._models.get(name)
        if model is None and name in self._loading:
            raise UnavailableError(f"model {short(name)!r} is being loaded")
        if model is None and self._is_new:
            raise UnavailableError("this frontend has just started, and knows no worker yet")
        if model is None:
            served = sorted(model.card.name for model in self.models)
            known = ", ".join(map(repr, served)) or "none now"
            raise NotFoundError(f"no model {short(name)!r}; served: {known}", param="model")
        return model

    @property
    def _is_new(self) -> bool:
        """True while no worker is known, and one that was lost would still be remembered."""
        if self._models or self._loading:
            return False
        return time.perf_counter() - self._started_s < self._model_grace_s

    def members(self, model: ServedModel) -> Mapping[str, Instance]:
        """Return the present instances of the variant of `model`, by instance id."""
        current = self._models.get(model.card.name)
        if current is model:  # nothing has changed since the request began
            return model.instances
        return current.instances if current and self.is_in_force(model) else {}

    def is_in_force(self, model: ServedModel) -> bool:
        """Return True while no other variant is served under the name of `model`."""
        current = self._models.get(model.card.name)
        return current is not None and (
            compatibility_key(current.card) == compatibility_key(model.card)
        )

    def reachable(self, model: ServedModel) -> list[str]:
        """Return the ids of the instances of this model, without those that were lost."""
        members = self.members(model)
        if not self._lost:
            return list(members)
        return [each for each, instance in members.items() if instance.address not in self._lost]

    def untroubled(self, model: ServedModel) -> list[str]:
        """Return the reachable instances of this model, without those that failed a moment ago."""
        reachable = self.reachable(model)
        if not self._excluded_until_s:
            return reachable
        now = time.perf_counter()
        self._excluded_until_s = {k: v for k, v in self._excluded_until_s.items() if v > now}
        return [each for each in reachable if each not in self._excluded_until_s]

    def is_quiet(self, model: ServedModel, instance_id: str) -> bool:
        """Return True when a heartbeat of this instance is late."""
        instance = self.members(model).get(instance_id)
        return instance is not None and self._client.is_quiet(instance.address)

    def candidates(self, model: ServedModel) -> list[str]:
        """Return the untroubled instances of this model, without those that are quiet."""
        return [each for each in self.untroubled(model) if not self.is_quiet(model, each)]

    def absent_s(self, model: ServedModel) -> float | None:
        """Return the time since the last worker of this model was lost; None with one."""
        since_s = self._absent_since_s.get(model.card.name)
        return None if since_s is None else time.perf_counter() - since_s

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

    def _on_card(self, _name: str, card: ModelCard | None) -> None:
        if card is not None and (fault := fault_of(card)):
            logger.warning("ignored a model card of %s: %s", card.instance_id, fault)
        self._follow_endpoints()
        self._on_change()

    def _on_instance(self, _instance_id: str, _instance: Instance | None) -> None:
        self._on_change()

    def _is_worker(self, address: str) -> bool:
        return any(instance.address == address for instance in self.instances.values())

    def _on_change(self) -> None:
        self._refresh()
        self._lost.connect({instance.address for instance in self.instances.values()})
        now = time.perf_counter()
        absent = [name for name, model in self._models.items() if not self.reachable(model)]
        self._absent_since_s = {name: self._absent_since_s.get(name, now) for name in absent}
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
        cards = [card for card in self._cards_view.items.values() if not fault_of(card)]
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
        for name in self._models.keys() - by_name.keys():
            self._note_departure(name)
        for name, group in by_name.items():
            self._update_model(name, group)
        named = {card.name for card in cards if card.endpoint in self._endpoints}
        self._loading = named - self._models.keys()
        self.has_text_models = any(map(self.reads_text, self._models))
        lengths = [model.card.context_length for model in self._models.values()]
        self.longest_context = min([max(lengths, default=MAX_PROMPT_TOKENS), MAX_PROMPT_TOKENS])
        digests = {card.files_digest for card in cards}
        self._texts.keep(digests | {model.card.files_digest for model in self._models.values()})

    def _note_departure(self, name: str) -> None:
        """Keep a model that has no worker for a while: its requests are told to come back."""
        self._models[name] = replace(self._models[name], instances={})
        if name not in self._departures:
            loop = asyncio.get_running_loop()
            self._departures[name] = loop.call_later(self._model_grace_s, self._forget, name)

    def _forget(self, name: str) -> None:
        del self._departures[name]
        del self._models[name]
        logger.info("model %s has had no worker for %g s", name, self._model_grace_s)
        self._on_change()

    def _update_model(self, name: str, cards: list[ModelCard]) -> None:
        departure = self._departures.pop(name, None)
        if departure is not None:
            departure.cancel()
        present = self._models.get(name)
        card_in_use = present.card if present else None
        members = agreeing(variant_in_force(cards, card_in_use), card_in_use)
        card = narrowest(members)
        if len(members) < len(cards):
            num_others = len(cards) - len(members)
            logger.warning(
                "model %s: %d workers serve another variant or a shorter context", name, num_others
            )
        instances = {
            member.instance_id: instance
            for member in members
            if (instance := self._instance_of(member))
        }
        if card.model_input == "text":
            self._models[name] = ServedModel(card, instances)
        elif text := self._texts.get(card.files_digest):
            self._models[name] = TokenModel(card, instances, text)
        elif present is not None:
            self._models[name] = replace(present, instances={})

    def _holders(self, digest: str) -> list[Instance]:
        return [
            instance
            for card in self._cards_view.items.values()
            if card.files_digest == digest and (instance := self._instance_of(card))
        ]
