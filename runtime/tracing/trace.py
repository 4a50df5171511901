"""A file of requests and their stages for Perfetto and chrome://tracing.

The file is a JSON array of Chrome trace events. Viewers do not need its closing bracket, so that
the file of a killed process can be read. One process per frontend or worker, one row per request.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from tandem.runtime.errors import ConfigError
from tandem.runtime.tasks import ends_within
from tandem.runtime.tracing.span_record import EPOCH_US, SpanRecord

logger = logging.getLogger(__name__)

Event = dict[str, Any]

FLUSH_INTERVAL_S = 1.0
MAX_FILE_BYTES = 256 << 20  # then a new file is begun, and the one before the last is gone
MAX_PENDING_BYTES = 16 << 20  # when the disk is too slow; later requests are dropped
_encode = msgspec.json.Encoder().encode


class TraceFile:
    """Collects the timelines of finished requests; `async with` opens the file and closes it.

    Without a path it does nothing. `record` never waits and never raises: it fills a buffer, which
    a thread writes out every second. Belongs to one event loop.
    """

    def __init__(self, path: str | None, role: str, instance_id: str) -> None:
        self.path = None if path is None else trace_path(path, role, instance_id)
        self.num_dropped = 0
        self._role = role
        self._instance_id = instance_id
        # Containers number their processes alike; the instance's id tells them apart.
        self._pid = zlib.crc32(instance_id.encode()) >> 1
        self._rows = itertools.count(1)
        self._head = b""
        self._pending = bytearray()
        self._file: BinaryIO | None = None
        self._num_written_bytes = 0
        self._closing = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Open the file. Raise ConfigError when it cannot be written."""
        if self.path is not None:
            try:
                self._file = self.path.open("wb", buffering=0)
            except OSError as error:
                raise ConfigError(
                    f"runtime.trace_file: cannot write {self.path}: {error.strerror}",
                    param="runtime.trace_file",
                ) from error
            name = f"{self._role} {self._instance_id} ({socket.gethostname()}, pid {os.getpid()})"
            self._head = b"[\n" + _encode(self._event("M", "process_name", args={"name": name}))
            self._pending += self._head
            self._writing = asyncio.create_task(self._write_until_closed())
            logger.info("requests are traced to %s", self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is None:
            return
        self._closing.set()
        await self._writing
        if self.num_dropped:
            logger.warning("%d requests are missing in %s", self.num_dropped, self.path)

    @property
    def is_open(self) -> bool:
        """True while requests are recorded."""
        return self._writing is not None

    def record(self, record: SpanRecord) -> None:
        """Add a request that has ended."""
        if not self.is_open:
            return
        if self._file is None or self._closing.is_set() or len(self._pending) > MAX_PENDING_BYTES:
            self.num_dropped += 1
            return
        for index, event in enumerate(self._events(record)):
            self._pending += (b"," if index else b",\n") + _encode(event)

    def _events(self, record: SpanRecord) -> Iterator[Event]:
        """Yield the row's name, the request, and in it a slice per interval, a tick per stage."""
        row, start_us = next(self._rows), record.timeline.started_at * 1e6 + EPOCH_US
        args = {"request_id": record.request_id, **record.attributes}
        if trace_id := record.trace_id:
            args["trace_id"] = trace_id

        def at(phase: str, name: str, from_us: float, **fields: object) -> Event:
            ts = round(start_us + from_us, 1)
            return self._event(phase, name, tid=row, ts=ts, cat=record.role, **fields)

        yield self._event("M", "thread_name", tid=row, args={"name": record.request_id})
        yield at("X", "request", 0.0, dur=round(record.end_us, 1), args=args)
        for name, begin_us, us in record.parts():
            if begin_us is None:
                yield at("i", name, us, s="t")
            else:
                yield at("X", name, begin_us, dur=round(us - begin_us, 1))

    def _event(self, phase: str, name: str, **fields: object) -> Event:
        return {"ph": phase, "name": name, "pid": self._pid, **fields}

    async def _write_until_closed(self) -> None:
        is_last = False
        while not is_last:
            is_last = await ends_within(self._closing.wait(), FLUSH_INTERVAL_S)
            data, self._pending = self._pending, bytearray()
            if data or is_last:
                await asyncio.to_thread(self._write, bytes(data), is_last)

    def _write(self, data: bytes, is_last: bool) -> None:
        """Write on a thread. An error ends the trace after its last whole event."""
        if self._file is None:
            return
        try:
            left = memoryview(data + b"\n]\n" if is_last else data)
            while left:
                left = left[self._file.write(left) :]
            self._num_written_bytes += len(data)
            if is_last:
                self._file.close()
            elif self._num_written_bytes > MAX_FILE_BYTES:
                self._file = self._begin_anew(self._file)
        except OSError as error:
            logger.error("the trace %s ends here: %s", self.path, error)
            with contextlib.suppress(OSError, ValueError):
                self._file.truncate(self._num_written_bytes)
            self._file.close()
            self._file = None

    def _begin_anew(self, full: BinaryIO) -> BinaryIO:
        """Put a full file aside, in the place of the last one that was, and return a new one."""
        assert self.path is not None
        full.write(b"\n]\n")
        full.close()
        self.path.replace(before_path(self.path))
        fresh = self.path.open("wb", buffering=0)
        fresh.write(self._head)
        self._num_written_bytes = len(self._head)
        return fresh


def before_path(path: Path) -> Path:
    """Return the place of what was traced before the file at `path` was begun."""
    return path.with_name(f"{path.stem}-before{path.suffix}")


def trace_path(path: str, role: str, instance_id: str) -> Path:
    """Return the worker's own file: the worker's name replaces `{instance}` in `path`.

    Without `{instance}` the name goes before the suffix, or into `path` where that is a folder.
    """
    own = f"{role}-{instance_id}"
    if "{instance}" in path:
        return Path(path.replace("{instance}", own))
    whole = Path(path)
    if whole.is_dir():
        return whole / f"trace-{own}.json"
    return whole.with_name(f"{whole.stem}-{own}{whole.suffix}")
