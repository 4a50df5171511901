"""The progress of a process that does not serve yet, for those that wait for it.

/tandem/{namespace}/progress/{id}    ProgressReport, while long work goes on
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Annotated

import msgspec

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import TandemError
from tandem.runtime.process.lifecycle import started
from tandem.runtime.process.work import Work, on_work
from tandem.runtime.store.discovery import Discovery, TypedView
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.bounds import Count, Message, Share

logger = logging.getLogger(__name__)

_MAX_LINE = 200
_Words = Annotated[str, msgspec.Meta(max_length=_MAX_LINE)]


class ProgressReport(Message, frozen=True, tag=False):
    """The work of one process, as its own progress bar has it."""

    component: _Words
    model: _Words
    host: _Words
    pid: Count
    line: _Words  # with the remaining time
    share: Share | None = None  # done; None: unknown


def progress_prefix(namespace: str) -> str:
    """Return the prefix of all reports."""
    return f"/tandem/{namespace}/progress/"


def watch_progress(discovery: Discovery, namespace: str) -> TypedView[ProgressReport]:
    """Follow id |-> report."""
    return TypedView(discovery.watch(progress_prefix(namespace)), ProgressReport)


@contextlib.contextmanager
def reported(config: RuntimeConfig, component: str, model: str) -> Iterator[None]:
    """Report the long work of the body, from a thread: the body may block.

    Nothing is started for a body without long work. Without etcd there are no reports.
    """
    works: SimpleQueue[Work | None] = SimpleQueue()
    starting = threading.Lock()  # taken for ever by the first work

    def on_event(work: Work | None) -> None:
        if work is not None:
            works.put(work)
            if starting.acquire(blocking=False):
                threading.Thread(target=run, name="progress", daemon=True).start()

    def run() -> None:
        try:
            asyncio.run(_report(config, component, model, works))
        except TandemError as error:
            logger.info("no progress is reported: %s", error.message)

    undo = on_work(on_event)
    try:
        yield
    finally:
        undo()
        works.put(None)


async def _report(
    config: RuntimeConfig, component: str, model: str, works: SimpleQueue[Work | None]
) -> None:
    """Put the latest work until there is none; the report is deleted then."""
    key = progress_prefix(config.namespace) + new_id()
    async with started(EtcdDiscovery(config)) as discovery:
        while (work := await asyncio.to_thread(_latest, works)) is not None:
            names = (component, model[:_MAX_LINE], socket.gethostname(), os.getpid())
            report = ProgressReport(*names, work.line[:_MAX_LINE], work.share)
            await discovery.put(key, msgspec.json.encode(report))


def _latest(works: SimpleQueue[Work | None]) -> Work | None:
    work = works.get()
    while work is not None and not works.empty():
        work = works.get()
    return work
