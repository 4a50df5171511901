"""Logging of a process: one line per event, naming the role and the instance."""

import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal, TextIO

import msgspec

from tandem.runtime.printable import masked, one_line
from tandem.runtime.tracing.span_ids import trace_id_of

LogFormat = Literal["text", "json"]

MAX_MESSAGE_BYTES = 1024
_MAX_TRACEBACK_LINES = 100  # the last ones, where the error is
# Loggers whose lines below warning are of no use to an operator of Tandem.
_CHATTY = ("asyncio", "grpc", "httpx", "nats", "nats.aio.client", "urllib3", "uvicorn.access")

# Id and headers of the request whose task logs.
_request: ContextVar[tuple[str, Mapping[str, str]]] = ContextVar("request", default=("", {}))


def log_for(request_id: str, headers: Mapping[str, str]) -> None:
    """Give the lines of this task, and of those that it starts, the ids of a request."""
    _request.set((request_id, headers))


# Other formatters, such as those of a test's logs, expect these in a record too.
_NOT_SHOWN = {
    **dict.fromkeys(("filename", "funcName", "module", "pathname"), ""),
    **dict.fromkeys(("lineno", "relativeCreated"), 0),
    **dict.fromkeys(("exc_text", "stack_info", "process", "processName"), None),
    **dict.fromkeys(("taskName", "thread", "threadName"), None),
}


class _Record(logging.LogRecord):
    """A record without the facts that no line shows, which take most of its time."""

    def __init__(
        self, name: str, level: int, _path: str, _line: int, msg: object, args: Any, exc_info: Any,
        *_: object, **_fields: object,
    ) -> None:  # fmt: skip
        if args and len(args) == 1 and isinstance(args[0], Mapping) and args[0]:
            args = args[0]  # values by name
        self.__dict__.update(_NOT_SHOWN)
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.msg, self.args, self.exc_info = msg, args, exc_info
        self.created = time.time()
        self.msecs = self.created % 1 * 1000


class LineFormatter(logging.Formatter):
    """One line per event: control characters escaped, long messages cut, passwords masked.

    The lines of a traceback follow, indented.
    """

    def __init__(self, role: str, instance_id: str) -> None:
        super().__init__()
        self._process = f"{role}/{instance_id}" if instance_id else role

    def format(self, record: logging.LogRecord) -> str:
        message = one_line(masked(record.getMessage()), MAX_MESSAGE_BYTES)
        head = f"{_time(record)} {record.levelname:7} {self._process} {record.name}: {message}"
        return "\n  ".join([head, *_traceback(self, record)]) if record.exc_info else head


class JsonFormatter(logging.Formatter):
    """One JSON object per event, its traceback included; ids only where there are some."""

    def __init__(self, role: str, instance_id: str) -> None:
        super().__init__()
        self._process = {"role": role, "instance": instance_id} if instance_id else {"role": role}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": one_line(masked(record.getMessage()), MAX_MESSAGE_BYTES),
        }
        request_id, headers = _request.get()
        if request_id:
            line["request_id"] = one_line(request_id, MAX_MESSAGE_BYTES)
        if trace_id := trace_id_of(headers):
            line["trace_id"] = trace_id
        if traceback := _traceback(self, record):
            line["traceback"] = "\n".join(traceback)
        return msgspec.json.encode(line).decode()


def _time(record: logging.LogRecord) -> str:
    """Return the time of an event in UTC, with milliseconds."""
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=1)
def _second(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Return the last lines of an event's traceback; none where it has no traceback."""
    if not record.exc_info:
        return []
    last = formatter.formatException(record.exc_info).split("\n")[-_MAX_TRACEBACK_LINES:]
    return [one_line(masked(line), MAX_MESSAGE_BYTES) for line in last]


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes lines to stderr, which keeps none of them back: no line is flushed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record."""
        try:
            self.stream.write(self.format(record) + self.terminator)
        except Exception:
            self.handleError(record)


def log_format() -> LogFormat:
    """Return the format in which this process logs."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(h.formatter, JsonFormatter) for h in handlers) else "text"


def setup_logging(level: str, role: str, instance_id: str = "", format: LogFormat = "text") -> None:
    """Log to stderr from `level` ("debug" .. "error") on; replaces earlier handlers.

    A line of text is `time level role/instance logger: message`, in UTC with milliseconds; the
    lines of a traceback are indented.
    """
    handler = _StderrHandler(sys.stderr)
    formatter = JsonFormatter if format == "json" else LineFormatter
    handler.setFormatter(formatter(role, instance_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.setLogRecordFactory(_Record)
    logging._srcfile = None  # no line shows its caller, and finding it out takes long
