"""`run(Engine)`: the `main` of an engine's process, and the engine by its name."""

import logging
import sys

import uvloop

from tandem.runtime.errors import ConfigError, TandemError
from tandem.sdk.engine.errors import EngineShutdown
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine_worker.worker import EngineWorker
from tandem.sdk.worker.targets import load_class

logger = logging.getLogger(__name__)


def run(engine_cls: type[LLMEngine], argv: list[str] | None = None) -> None:
    """Serve the engine that `engine_cls.from_args(argv)` makes, until a signal ends it.

    Blocks. Exit with one line and status 1 when the engine does not start or the cluster cannot be
    reached, and with status 70 at a second signal.
    """
    try:
        uvloop.run(_run(engine_cls, argv))
    except TandemError as error:
        cause = error.__cause__
        # the stack is of use only where the author's engine raised an error of its own
        is_own = isinstance(error, EngineShutdown) and not isinstance(cause, TandemError)
        logger.error("%s", error.message, exc_info=cause if is_own else None)
        sys.exit(1)


def load_engine(target: str) -> type[LLMEngine]:
    """Return the engine class that `module:Class` names. Raise ConfigError if there is none."""
    found = load_class(target)
    if not issubclass(found, LLMEngine):
        raise ConfigError(f"{target} is no engine: it must be a subclass of LLMEngine")
    return found


async def _run(engine_cls: type[LLMEngine], argv: list[str] | None) -> None:
    engine, config = await engine_cls.from_args(argv)
    worker = EngineWorker(engine, config)
    worker.runtime.log_by_default()
    await worker.run()
