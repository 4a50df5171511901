"""A section of the config in force: that of the process, overlaid with the live values in etcd."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import pydantic

from tandem.runtime.errors import ProtocolError
from tandem.runtime.store.discovery import WatchView, config_prefix
from tandem.runtime.wire.decoding import decode_json

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=pydantic.BaseModel)


class LiveSection(Generic[C]):
    """Follows live values of a section: those of one model go before those of its namespace.

    An invalid value is logged and changes nothing. `current` is replaced as a whole, so any thread
    may read it; `on_change` is called with it. A process without a model follows its namespace.
    """

    def __init__(
        self,
        section: str,
        base: C,
        view: WatchView,
        namespace: str,
        model: str,
        on_change: Callable[[C], object] = lambda _: None,
    ) -> None:
        self._section = section
        self._base = base
        self._on_change = on_change
        self._prefixes = (config_prefix(namespace), config_prefix(namespace, model))
        self._live: dict[str, dict[str, object]] = {prefix: {} for prefix in self._prefixes}
        self.current = base
        self._unsubscribe = view.subscribe(self._changed)

    def close(self) -> None:
        """Stop following."""
        self._unsubscribe()

    def _changed(self, key: str, value: bytes | None) -> None:
        folder, _, full_name = key.rpartition("/")
        section, _, name = full_name.partition(".")
        prefix = f"{folder}/"
        if section != self._section or prefix not in self._prefixes:
            return
        live = {**self._live, prefix: dict(self._live[prefix])}
        live[prefix].pop(name, None)
        try:
            if value is not None:
                live[prefix][name] = decode_json(value)
            values = self._base.model_dump()
            for each in self._prefixes:
                values |= live[each]
            changed = type(self._base).model_validate(values)
        except (ProtocolError, pydantic.ValidationError) as error:
            reason = "the live value of %s is refused and the old one stays: %s"
            logger.warning(reason, full_name, error)
            return
        self._live = live
        if changed != self.current:
            self.current = changed
            logger.info("%s is now %s", full_name, getattr(changed, name, "the default"))
            self._on_change(changed)
