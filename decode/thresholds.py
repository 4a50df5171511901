"""The thresholds in force: those of the config, overlaid with the live values in etcd."""

from tandem.decode.config import DisaggConfig
from tandem.runtime.store.discovery import WatchView
from tandem.runtime.store.live_config import LiveSection


class LiveThresholds(LiveSection[DisaggConfig]):
    """Follows live values of `disagg`."""

    def __init__(self, base: DisaggConfig, view: WatchView, namespace: str, model: str) -> None:
        super().__init__("disagg", base, view, namespace, model)
