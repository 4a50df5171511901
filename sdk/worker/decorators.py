"""`@worker`: a function of a runtime becomes a process's main coroutine."""

import asyncio
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar, overload

from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.process.lifecycle import signals
from tandem.sdk.worker.distributed_runtime import DistributedRuntime

logger = logging.getLogger(__name__)

T = TypeVar("T")
Main = Callable[..., Awaitable[T]]
Decorated = Callable[..., Coroutine[Any, Any, T | None]]
_AFTER_DRAIN_S = 5.0  # for the rest of `main` after its endpoints have returned


@overload
def worker(main: Main[T]) -> Decorated[T]: ...


@overload
def worker(*, static: bool = False) -> Callable[[Main[T]], Decorated[T]]: ...


def worker(main: Main[T] | None = None, *, static: bool = False) -> Any:
    """Call `main` with a connected runtime as its first argument, and close it at the end.

    SIGTERM, SIGINT and SIGHUP begin the orderly end: endpoints drain and return, and `main`
    continues after them; a `main` that serves none is cancelled, and None is returned for it. A
    second signal ends the process with status 70.
    A wrong setting, or a service that cannot be reached, ends the process with one line.
    Used as `@worker`, `@worker()` or `@worker(static=False)`; `static=True`, a worker without
    discovery, is a ConfigError.
    """
    if static:
        raise ConfigError("static=True: workers without discovery are not offered", param="static")
    if main is None:
        return worker

    @functools.wraps(main)
    async def run(*args: Any, **kwargs: Any) -> T | None:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_uncaught
        runtime = DistributedRuntime()
        runtime.log_by_default()
        task = asyncio.ensure_future(_run(main, runtime, args, kwargs))
        with _signals(runtime, task):
            try:
                return await task
            except asyncio.CancelledError:
                if not runtime.is_ending or not task.cancelled():
                    raise
                return None

    return run


dynamo_worker = worker


def _print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error of the setting as one line, any other with its stack."""
    if isinstance(error, ConfigError | ServiceError):
        print(f"error: {error.message}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


async def _run(
    main: Main[T], runtime: DistributedRuntime, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    async with runtime:
        return await main(runtime, *args, **kwargs)


@contextlib.contextmanager
def _signals(runtime: DistributedRuntime, task: "asyncio.Future[Any]") -> Iterator[None]:
    """Handle signals on the main thread; a worker on another ends by `runtime.shutdown()`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signal_name: str) -> None:
        logger.info("shutting down: %s", signal_name)
        if not runtime.served:
            task.cancel()
        else:
            timeout_s = runtime.config.drain_timeout_s + _AFTER_DRAIN_S
            asyncio.get_running_loop().call_later(timeout_s, task.cancel)
        runtime.shutdown()

    with signals(lambda: runtime.is_ending, end):
        yield
