"""Workers of engines that end quickly."""

import pytest


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grace that serves late requests of tests, and is not worth waiting for."""
    monkeypatch.setenv("TANDEM_SHUTDOWN_GRACE_S", "0.05")
