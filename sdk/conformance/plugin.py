"""A pytest plugin: one test per check of the conformance kit.

    pytest_plugins = ["tandem.sdk.conformance.plugin"]

    @pytest.fixture(scope="module")
    def conformance_engine():
        return MyEngine  # or a function that returns a new engine

    def test_my_engine_conforms(conformance_check):
        conformance_check()

The engine is examined once per module. The fixtures `conformance_argv` and `conformance_settings`
can be overridden as well.
"""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tandem.sdk.conformance.kit import CHECK_NAMES, ConformanceReport, EngineFactory, examine
from tandem.sdk.conformance.streams import ConformanceSettings

_FIXTURE = "conformance_check"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses `conformance_check` once per check."""
    if _FIXTURE in metafunc.fixturenames:
        metafunc.parametrize(_FIXTURE, CHECK_NAMES, indirect=True)


@pytest.fixture(scope="module")
def conformance_argv() -> Sequence[str]:
    """The arguments for `from_args` of the engine class."""
    return ()


@pytest.fixture(scope="module")
def conformance_settings() -> ConformanceSettings:
    """The requests to the engine and the time it may take."""
    return ConformanceSettings()


@pytest.fixture(scope="module")
def conformance_report(
    conformance_engine: EngineFactory,
    conformance_argv: Sequence[str],
    conformance_settings: ConformanceSettings,
) -> ConformanceReport:
    """The outcomes of all checks, made in an event loop of their own."""
    return asyncio.run(examine(conformance_engine, conformance_argv, conformance_settings))


@pytest.fixture
def conformance_check(
    request: pytest.FixtureRequest, conformance_report: ConformanceReport
) -> Callable[[], None]:
    """A function that raises the failure of its check, skips a check not made, or returns."""
    result = conformance_report.result(request.param)

    def check() -> None:
        if result.failure is not None:
            raise result.failure
        if result.not_run is not None:
            pytest.skip(result.not_run)

    return check
