"""Texts made fit for log lines and errors: on one line, short, and without passwords."""

import re

MAX_NAME_CHARS = 64
_URL_SECRET = re.compile(r"//(?:([^:@/,\s]*):)?[^,\s/]*@")
_CONTROL = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *(0x2028, 0x2029),  # line and paragraph separator
        *range(0x202A, 0x202F),  # changes of the direction of writing
        *range(0x2066, 0x206A),
    )
} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def one_line(text: str, max_bytes: int) -> str:
    """Return a text with its control characters escaped, cut at `max_bytes` of UTF-8."""
    if len(text) <= max_bytes and text.isascii() and text.isprintable():
        return text
    line = text[:max_bytes].translate(_CONTROL)
    encoded = line.encode("utf-8", "backslashreplace")
    if len(text) <= max_bytes and len(encoded) <= max_bytes:
        return line
    cut = f" ... ({len(text)} characters)"
    return encoded[: max_bytes - len(cut)].decode("utf-8", "ignore") + cut


def short(name: str) -> str:
    """Return a name for an error text, on one line and cut at `MAX_NAME_CHARS`."""
    start = name[: MAX_NAME_CHARS + 1]
    if not start.isprintable():
        start = start.translate(_CONTROL)
    return start if len(start) <= MAX_NAME_CHARS else start[: MAX_NAME_CHARS - 3] + "..."


def masked(text: str) -> str:
    """Return a text with the passwords and tokens of its URLs replaced."""
    if "@" not in text:
        return text
    return _URL_SECRET.sub(lambda url: f"//{url[1]}:***@" if url[1] else "//***@", text)
