"""The result of a check of this machine."""

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `tandem doctor`, with a remedy when it is not ok."""

    grade: Grade
    subject: str
    detail: str
    remedy: str = ""


def ok(subject: str, detail: str) -> Finding:
    return Finding("ok", subject, detail)


def warn(subject: str, detail: str, remedy: str) -> Finding:
    return Finding("warn", subject, detail, remedy)


def fail(subject: str, detail: str, remedy: str) -> Finding:
    return Finding("fail", subject, detail, remedy)
