"""The progress of a process that does not serve yet, as others see it."""

import threading
import time

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.process import progress
from tandem.runtime.process.progress import ProgressBar
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.store.progress_report import reported, watch_progress
from tests.services import eventually


async def test_others_see_long_work_while_it_goes_on(
    runtime_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVENT_INTERVAL_S", 0.0)
    discovery = EtcdDiscovery(runtime_config)
    await discovery.start()
    view = watch_progress(discovery, runtime_config.namespace)
    may_end = threading.Event()

    def load() -> None:
        with reported(runtime_config, "decode", "a-model"), ProgressBar("weights", total=4) as bar:
            bar.advance()
            bar.advance()
            may_end.wait(100)

    loading = threading.Thread(target=load)
    loading.start()

    def seen() -> list[tuple[str, str, float | None]]:
        return [(each.component, each.model, each.share) for each in view.items.values()]

    try:
        await eventually(lambda: seen() == [("decode", "a-model", 0.5)])
        (report,) = view.items.values()
        assert report.line.startswith("weights: ")
        may_end.set()
        await eventually(lambda: not view.items)
    finally:
        may_end.set()
        loading.join()
        await discovery.close()


def test_short_work_starts_nothing(runtime_config: RuntimeConfig) -> None:
    before = threading.active_count()
    with reported(runtime_config, "decode", "m"), ProgressBar("weights", total=1) as bar:
        bar.advance()
        assert threading.active_count() == before


def test_without_etcd_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVENT_INTERVAL_S", 0.0)
    away = RuntimeConfig(etcd_endpoints="http://127.0.0.1:9", connect_attempts=1)
    started_s = time.perf_counter()
    with reported(away, "decode", "m"), ProgressBar("weights", total=1) as bar:
        bar.advance()
    assert time.perf_counter() - started_s < 10.0
