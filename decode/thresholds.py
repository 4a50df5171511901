"""The thresholds in force: those of the config, overlaid with the live values in etcd."""

import logging

import msgspec
import pydantic

from tandem.decode.config import DisaggConfig
from tandem.runtime.discovery import WatchView

logger = logging.getLogger(__name__)


class LiveThresholds:
    """Follows `{prefix}disagg.*`; an invalid value is logged and changes nothing.

    `current` is replaced as a whole, so any thread may read it.
    """

    def __init__(self, base: DisaggConfig, view: WatchView, prefix: str) -> None:
        self._base = base
        self._prefix = prefix
        self._live: dict[str, object] = {}
        self.current = base
        self._unsubscribe = view.subscribe(self._changed)

    def close(self) -> None:
        self._unsubscribe()

    def _changed(self, key: str, value: bytes | None) -> None:
        section, _, name = key.removeprefix(self._prefix).partition(".")
        if section != "disagg":
            return
        live = dict(self._live)
        live.pop(name, None)
        try:
            if value is not None:
                live[name] = msgspec.json.decode(value)
            changed = DisaggConfig.model_validate({**self._base.model_dump(), **live})
        except (msgspec.DecodeError, pydantic.ValidationError) as error:
            logger.warning(
                "the live value of disagg.%s is refused and the old one stays: %s", name, error
            )
            return
        self._live = live
        if changed != self.current:
            self.current = changed
            logger.info("disagg.%s is now %s", name, getattr(changed, name, "the default"))
