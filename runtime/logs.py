"""Logging of a process: one line per event, naming the role and the instance."""

import logging
import sys
import time

# Loggers whose lines below warning are of no use to an operator of Tandem.
_CHATTY = ("asyncio", "grpc", "httpx", "nats", "nats.aio.client", "uvicorn.access")


def setup_logging(level: str, role: str, instance_id: str = "") -> None:
    """Log to stderr from `level` ("debug" .. "error") on; replaces earlier handlers.

    A line is `time level role/instance logger: message`, in UTC with milliseconds.
    """
    who = f"{role}/{instance_id}" if instance_id else role
    formatter = logging.Formatter(
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
