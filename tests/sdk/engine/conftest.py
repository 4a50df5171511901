"""Workers of engines that end quickly."""

import pytest

from tandem.runtime.config import RuntimeConfig


@pytest.fixture
def quick(runtime_config: RuntimeConfig) -> RuntimeConfig:
    return runtime_config.model_copy(update={"drain_timeout_s": 0.8})


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grace that serves late requests of tests, and is not worth waiting for."""
    monkeypatch.setenv("TANDEM_SHUTDOWN_GRACE_S", "0.05")
