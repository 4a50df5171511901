"""Versions of vLLM that do not work are refused by name."""

import sys

import pytest

from tandem.launch.cli.passed_on import run_engine
from tandem.runtime.errors import ConfigError
from tandem.vllm import versions


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", "0.32.7rc1"])
def test_a_version_of_the_range_is_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found)
    assert versions.check_version() == found


@pytest.mark.parametrize("found", ["0.31.4", "0.33.0", "1.0.0", "0.9.2", "dev"])
def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found)
    with pytest.raises(ConfigError, match=rf"vLLM {found} .*from 0\.32 and below 0\.33"):
        versions.check_version()


def test_a_missing_vllm_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(ConfigError, match=r"not installed.*make vllm"):
        versions.check_version()


def test_the_command_refuses_to_run_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "DISTRIBUTIONS", ("no-such-distribution",))
    monkeypatch.delitem(sys.modules, "tandem.vllm.engine", raising=False)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        run_engine(["vllm", "some-model"])
