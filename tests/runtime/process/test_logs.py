"""Log lines: one per event, short, and without passwords."""

import asyncio
import json
import logging
from typing import Any

import pytest

from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.printable import MAX_NAME_CHARS, masked, one_line, short
from tandem.runtime.process.logs import (
    MAX_MESSAGE_BYTES,
    JsonFormatter,
    LineFormatter,
    log_for,
    setup_logging,
)
from tests.services import free_port

HEAD = "INFO    decode/1 tandem.x: "
FORGED = "x\n2026-01-01T00:00:00.000Z INFO    decode/1 tandem.x: all is well"


def line_of(message: str, *args: object, error: Exception | None = None) -> str:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("tandem.x", logging.INFO, "", 0, message, args, exc_info)
    return LineFormatter("decode", "1").format(record).partition(" ")[2]


def test_a_name_with_a_line_break_forges_no_line() -> None:
    assert line_of("unknown field %s", FORGED) == f"{HEAD}unknown field " + FORGED.replace(
        "\n", "\\n"
    )
    assert line_of("%s", "\x1b[2J\r\x9b\u2028\u202e") == HEAD + r"\x1b[2J\r\x9b\u2028\u202e"


def test_the_lines_of_a_traceback_are_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        first, *others = line_of("failed", error=error).splitlines()
    assert first == f"{HEAD}failed"
    assert others[-2:] == ["  ValueError: x", "  " + FORGED.splitlines()[1]]
    assert all(line.startswith("  ") for line in others)


@pytest.mark.parametrize("char", ["a", "\n", "\u20ac", "\ud800"])
def test_a_message_of_megabytes_is_cut_at_one_kib(char: str) -> None:
    line = one_line(char * 8_000_000, MAX_MESSAGE_BYTES)
    assert MAX_MESSAGE_BYTES - 8 <= len(line.encode()) <= MAX_MESSAGE_BYTES
    assert line.endswith(" ... (8000000 characters)")


def test_a_short_message_stays_as_it_is() -> None:
    assert line_of("request %s: gr\u00fc\u00dfe", "r1") == f"{HEAD}request r1: gr\u00fc\u00dfe"


def test_names_in_errors_are_cut() -> None:
    assert short("generate") == "generate"
    assert short("a\nb\x7fé") == "a\\nb\\x7fé"
    assert len(short("n" * 60_000_000)) == MAX_NAME_CHARS


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:pass%2Fword@host:4222", "nats://user:***@host:4222"),
        ("nats://token@host:4222", "nats://***@host:4222"),
        ("nats://a:b@one:1,nats://c:d@two:2", "nats://a:***@one:1,nats://c:***@two:2"),
        ("nats://host:4222", "nats://host:4222"),
        ("at nats://u:p@h: write to me@example.org", "at nats://u:***@h: write to me@example.org"),
    ],
)
def test_the_secrets_of_urls_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert line_of("NATS at %s", url) == f"{HEAD}NATS at {shown}"


async def test_an_unreachable_nats_is_named_without_its_password() -> None:
    url = f"nats://user:hidden@127.0.0.1:{free_port()}"
    connection = NatsConnection(RuntimeConfig(nats_url=url, connect_attempts=1))
    with pytest.raises(ServiceError, match=r"nats://user:\*\*\*@127") as caught:
        await connection.start()
    assert "hidden" not in caught.value.message
    await connection.close()


async def test_a_line_of_json_has_the_ids_of_its_tasks_request() -> None:
    formatter = JsonFormatter("decode", "d-1")
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}

    async def line(request_id: str, **options: Any) -> dict[str, str]:
        if request_id:
            log_for(request_id, headers)
        record = logging.LogRecord(
            "tandem.x", logging.INFO, "", 0, "at %s", ("nats://u:p@h",), None
        )
        record.__dict__ |= options
        text = formatter.format(record)
        assert "\n" not in text
        found: dict[str, str] = json.loads(text)
        return found

    own = await asyncio.create_task(line("r-1"))
    assert (own["request_id"], own["trace_id"]) == ("r-1", "ab" * 16)
    assert (own["role"], own["instance"], own["level"]) == ("decode", "d-1", "info")
    assert own["message"] == "at nats://u:***@h"
    other = await asyncio.create_task(line(""))
    assert "request_id" not in other and "trace_id" not in other
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        failed = await line("", exc_info=(type(error), error, error.__traceback__))
    assert failed["traceback"].startswith("Traceback") and "ValueError: x" in failed["traceback"]


@pytest.mark.usefixtures("own_logging")
def test_a_line_names_role_and_instance_in_the_chosen_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("info", "decode", "d-1", "json")
    logging.getLogger("tandem.x").info("hello")
    assert json.loads(capsys.readouterr().err)["message"] == "hello"
    setup_logging("info", "decode", "d-1")
    logging.getLogger("tandem.x").info("hello")
    logging.getLogger("tandem.x").debug("not shown")
    logging.getLogger("grpc").info("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO    decode/d-1 tandem.x: hello")
