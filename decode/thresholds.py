"""The thresholds in force: those of the config, overlaid with the live values in etcd."""

import logging

import msgspec
import pydantic

from tandem.decode.config import DisaggConfig
from tandem.runtime.discovery import WatchView, config_prefix

logger = logging.getLogger(__name__)


class LiveThresholds:
    """Follows live values of `disagg`: those of one model go before those of its namespace.

    An invalid value is logged and changes nothing.
    `current` is replaced as a whole, so any thread may read it.
    """

    def __init__(self, base: DisaggConfig, view: WatchView, namespace: str, model: str) -> None:
        self._base = base
        self._prefixes = (config_prefix(namespace), config_prefix(namespace, model))
        self._live: dict[str, dict[str, object]] = {prefix: {} for prefix in self._prefixes}
        self.current = base
        self._unsubscribe = view.subscribe(self._changed)

    def close(self) -> None:
        self._unsubscribe()

    def _changed(self, key: str, value: bytes | None) -> None:
        folder, _, full_name = key.rpartition("/")
        section, _, name = full_name.partition(".")
        prefix = f"{folder}/"
        if section != "disagg" or prefix not in self._prefixes:
            return
        live = {**self._live, prefix: dict(self._live[prefix])}
        live[prefix].pop(name, None)
        try:
            if value is not None:
                live[prefix][name] = msgspec.json.decode(value)
            values = self._base.model_dump()
            for each in self._prefixes:
                values |= live[each]
            changed = DisaggConfig.model_validate(values)
        except (msgspec.DecodeError, pydantic.ValidationError) as error:
            logger.warning(
                "the live value of disagg.%s is refused and the old one stays: %s", name, error
            )
            return
        self._live = live
        if changed != self.current:
            self.current = changed
            logger.info("disagg.%s is now %s", name, getattr(changed, name, "the default"))
