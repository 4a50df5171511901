"""The options of a program: a frozen dataclass whose fields are its flags."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from tandem.runtime.errors import ConfigError

T = TypeVar("T")


def option(
    default: Any,
    help_text: str,
    *,
    group: str = "",
    least: float | None = None,
    is_hidden: bool = False,
    is_positional: bool = False,
) -> Any:
    """Return a field that is a flag; `least` is the smallest number that it takes.

    A `group` is the title of the flags from this one on.
    """
    flag = {"help": help_text, "group": group, "least": least}
    flag |= {"is_hidden": is_hidden, "is_positional": is_positional}
    return dataclasses.field(default=default, metadata=flag)


def parse(options: type[T], module: str, arguments: Sequence[str] | None, prog: str = "") -> T:
    """Return the options that a command line gives, by default the process's own.

    A wrong one ends the process with status 2 and one line.
    """
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    positional = [each.name for each in fields if each.metadata["is_positional"]]
    parser = _Parser(
        prog=prog or f"python -m {module}",
        usage="%(prog)s [options]" + "".join(f" {name.upper()} ..." for name in positional),
        description=options.__doc__,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(options)
    group: Any = parser
    for field in fields:
        if title := field.metadata["group"]:
            group = parser.add_argument_group(title)
        _add(group, field, hints[field.name])
    try:
        given = vars(parser.parse_args(arguments))
        return options(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    except ConfigError as error:
        parser.error(error.message)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def _add(group: Any, field: "dataclasses.Field[Any]", hint: Any) -> None:
    flag = field.metadata
    name = field.name if flag["is_positional"] else "--" + field.name.replace("_", "-")
    text = flag["help"] + _default_text(field.default)
    shape = _shape(_without_none(hint), flag["least"])
    group.add_argument(
        name, help=argparse.SUPPRESS if flag["is_hidden"] else text.replace("%", "%%"), **shape
    )


def _shape(hint: Any, least: float | None) -> dict[str, Any]:
    """Return argparse's description of values of a type."""
    inner = typing.get_args(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": inner}
    if typing.get_origin(hint) is tuple and inner[-1] is Ellipsis:
        return {"action": "extend", "nargs": "+", **_shape(inner[0], least)}
    if typing.get_origin(hint) is tuple:
        return {"nargs": len(inner), "type": inner[0]}
    return {"type": hint if least is None else _at_least(hint, least)}


def _at_least(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least:g}")
        return value

    return number


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    (kind,) = (each for each in typing.get_args(hint) if each is not type(None))
    return kind


def _default_text(default: Any) -> str:
    is_said = default is dataclasses.MISSING or default in (None, "", ()) or default is False
    return "" if is_said else f" (default: {'on' if default is True else default})"
