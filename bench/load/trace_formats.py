"""The formats of trace files: Mooncake's JSON, and the CSV of Azure's and BurstGPT's traces."""

import csv
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from tandem.runtime.errors import ConfigError

FORMATS = (
    "a trace is JSON of objects with timestamp (ms), input_length, output_length and hash_ids "
    "(Mooncake's), one a line or in a list, or CSV with the columns TIMESTAMP, ContextTokens and "
    "GeneratedTokens (Azure's), or Timestamp (s), Request tokens and Response tokens (BurstGPT's)"
)
_AZURE = ("timestamp", "contexttokens", "generatedtokens")
_BURSTGPT = ("timestamp", "request tokens", "response tokens")


class TraceEntry(msgspec.Struct, frozen=True):
    """One request; `hash_ids` name the prompt's 512-token blocks, chained by prefix."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def entries_in(text: TextIO, name: str) -> Iterator[TraceEntry]:
    """Yield the requests of a trace in the order of the file.

    Raises ConfigError with the line, or the number in a list.
    """
    try:
        first = next((line for line in text if line.strip()), "")
        text.seek(0)
        if first.lstrip().startswith("["):
            yield from _of_list(text.read(), name)
        elif first.lstrip().startswith("{"):
            yield from _of_lines(text, name)
        elif first:
            yield from _of_csv(text, name)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not text in UTF-8; {FORMATS}") from error


def _of_lines(lines: Iterator[str], name: str) -> Iterator[TraceEntry]:
    decoder = msgspec.json.Decoder(TraceEntry)
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise _refused(f"{name}:{number}", error) from error
            yield _checked(entry, f"{name}:{number}")


def _of_list(text: str, name: str) -> Iterator[TraceEntry]:
    try:
        entries = msgspec.json.decode(text, type=list[TraceEntry])
    except msgspec.DecodeError as error:
        raise _refused(name, error) from error
    for index, entry in enumerate(entries):
        yield _checked(entry, f"{name}[{index}]")


def _of_csv(lines: Iterator[str], name: str) -> Iterator[TraceEntry]:
    rows = csv.reader(lines)
    header = {title.strip().lower(): index for index, title in enumerate(next(rows))}
    columns = next((each for each in (_AZURE, _BURSTGPT) if header.keys() >= set(each)), None)
    if columns is None:
        raise ConfigError(f"{name}:1: not a header of a trace; {FORMATS}")
    try:
        for row in rows:
            where = f"{name}:{rows.line_num}"
            if not row:
                continue
            entry = _of_row(row, header, columns, where)
            if entry.input_length and entry.output_length:  # requests that failed have 0
                yield _checked(entry, where)
    except csv.Error as error:
        raise _refused(f"{name}:{rows.line_num}", error) from error


def _of_row(
    row: list[str], header: Mapping[str, int], columns: tuple[str, str, str], where: str
) -> TraceEntry:
    try:
        time, *lengths = (row[header[column]].strip() for column in columns)
        timestamp = _ms_of_date(time) if columns is _AZURE else 1e3 * float(time)
        num_input, num_output = (int(float(length)) for length in lengths)
    except (IndexError, ValueError, OverflowError) as error:
        raise _refused(where, error) from error
    return TraceEntry(timestamp, num_input, num_output)


def _ms_of_date(text: str) -> float:
    """Return the milliseconds since 1970 of a date; one without a zone is in UTC."""
    date = datetime.fromisoformat(text)
    return 1e3 * (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _checked(entry: TraceEntry, where: str) -> TraceEntry:
    if entry.input_length < 1 or entry.output_length < 1:
        raise ConfigError(f"{where}: lengths must be at least 1 token")
    if entry.timestamp != entry.timestamp or abs(entry.timestamp) == float("inf"):
        raise ConfigError(f"{where}: timestamp must be a number")
    return entry


def _refused(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{where}: not a trace entry: {error}; {FORMATS}")
