"""Log lines: one per event, short, and without passwords."""

import logging

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.logs import MAX_MESSAGE_BYTES, LineFormatter
from tandem.runtime.nats import NatsConnection
from tandem.runtime.printable import MAX_NAME_CHARS, masked, one_line, short
from tests.services import free_port

FORGED = "x\n2026-01-01T00:00:00.000Z INFO    decode/1 tandem.x: all is well"


def line_of(message: str, *args: object, error: Exception | None = None) -> str:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("tandem.x", logging.INFO, "", 0, message, args, exc_info)
    return LineFormatter("%(levelname)s %(message)s").format(record)


def test_a_name_with_a_line_break_forges_no_line() -> None:
    assert line_of("unknown field %s", FORGED) == "INFO unknown field " + FORGED.replace(
        "\n", "\\n"
    )
    assert line_of("%s", "\x1b[2J\r\x9b\u2028\u202e") == r"INFO \x1b[2J\r\x9b\u2028\u202e"


def test_the_lines_of_a_traceback_are_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        first, *others = line_of("failed", error=error).splitlines()
    assert first == "INFO failed"
    assert others[-2:] == ["  ValueError: x", "  " + FORGED.splitlines()[1]]
    assert all(line.startswith("  ") for line in others)


@pytest.mark.parametrize("char", ["a", "\n", "\u20ac", "\ud800"])
def test_a_message_of_megabytes_is_cut_at_one_kib(char: str) -> None:
    line = one_line(char * 8_000_000, MAX_MESSAGE_BYTES)
    assert MAX_MESSAGE_BYTES - 8 <= len(line.encode()) <= MAX_MESSAGE_BYTES
    assert line.endswith(" ... (8000000 characters)")


def test_a_short_message_stays_as_it_is() -> None:
    assert line_of("request %s: gr\u00fc\u00dfe", "r1") == "INFO request r1: gr\u00fc\u00dfe"


def test_names_in_errors_are_cut() -> None:
    assert short("generate") == "generate"
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
    assert line_of("NATS at %s", url) == f"INFO NATS at {shown}"


async def test_an_unreachable_nats_is_named_without_its_password() -> None:
    url = f"nats://user:hidden@127.0.0.1:{free_port()}"
    connection = NatsConnection(RuntimeConfig(nats_url=url, connect_attempts=1))
    with pytest.raises(ServiceError, match=r"nats://user:\*\*\*@127") as caught:
        await connection.start()
    assert "hidden" not in caught.value.message
    await connection.close()
