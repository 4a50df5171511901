"""Logging of a process: one line per event, naming the role and the instance."""

import logging
import sys
import time

from tandem.runtime.printable import masked, one_line

MAX_MESSAGE_BYTES = 1024
_MAX_TRACEBACK_LINES = 100  # the last ones, where the error is
# Loggers whose lines below warning are of no use to an operator of Tandem.
_CHATTY = ("asyncio", "grpc", "httpx", "nats", "nats.aio.client", "uvicorn.access")


class LineFormatter(logging.Formatter):
    """One line per event, whatever a stranger put into its message: escaped, cut, no passwords."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(masked(record.message), MAX_MESSAGE_BYTES)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if "\n" not in text:  # nearly every record
            return text
        head, *details = text.split("\n")
        last = details[-_MAX_TRACEBACK_LINES:]
        lines = (one_line(masked(line), MAX_MESSAGE_BYTES) for line in last)
        return "\n".join([head, *(f"  {line}" for line in lines)])


def setup_logging(level: str, role: str, instance_id: str = "") -> None:
    """Log to stderr from `level` ("debug" .. "error") on; replaces earlier handlers.

    A line is `time level role/instance logger: message`, in UTC with milliseconds; the lines of a
    traceback are indented.
    """
    who = f"{role}/{instance_id}" if instance_id else role
    formatter = LineFormatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {who.replace('%', '%%')} %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # No line shows these, and finding them out takes a fifth of a line's time.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
