"""The level of log lines in force: that of the config, or the live value in etcd."""

import logging

import msgspec

from tandem.runtime.config import LogLevel
from tandem.runtime.discovery import WatchView, config_prefix

logger = logging.getLogger(__name__)

_KEY = "runtime.log_level"
_decode = msgspec.json.Decoder(LogLevel).decode


class LiveLogLevel:
    """Follows the live level; that of one model goes before that of its namespace.

    An invalid value is logged and changes nothing.
    """

    def __init__(self, base: LogLevel, view: WatchView, namespace: str, model: str) -> None:
        self._base = base
        # weakest first; a process without a model follows its namespace alone
        prefixes = [config_prefix(namespace)] + ([config_prefix(namespace, model)] if model else [])
        self._levels: dict[str, LogLevel | None] = {f"{prefix}{_KEY}": None for prefix in prefixes}
        view.subscribe(self._changed)

    def _changed(self, key: str, value: bytes | None) -> None:
        if key not in self._levels:
            return
        try:
            self._levels[key] = None if value is None else _decode(value)
        except msgspec.DecodeError as error:
            logger.warning("the live value of %s is refused and the old one stays: %s", _KEY, error)
            return
        level = next(filter(None, reversed(self._levels.values())), self._base)
        logging.getLogger().setLevel(level.upper())
        logger.info("%s is now %s", _KEY, level)
