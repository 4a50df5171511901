"""Plain values on the wire, and from Pydantic models, dataclasses and enums to them."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_type_hints

import msgspec
from pydantic import BaseModel, ValidationError

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Call


def as_plain(value: object) -> object:
    """Return a Pydantic model as a dict. Raise TypeError for any other value."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} cannot be sent: give dicts, lists, strings, numbers")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=as_plain)


def encode_value(value: object) -> bytes:
    """Return a value in msgpack. Raise TypeError or OverflowError if it cannot be sent."""
    return _ENCODER.encode(value)


def encode_call(value: object) -> bytes:
    """Return the payload of a call. Raise InvalidRequestError if `value` cannot be sent."""
    try:
        return _ENCODER.encode(Call(msgspec.Raw(_ENCODER.encode(value))))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(str(error), param="request") from error


def request_reader(handler: Callable[..., object]) -> Callable[[Any], Any]:
    """Return the function from a plain value to the handler's first argument.

    A handler that names a Pydantic model gets an instance of it, also from a JSON string. The
    function raises InvalidRequestError naming the field that does not fit.
    """
    model = _request_model(handler)
    if model is None:
        return lambda value: value

    def read(value: Any) -> BaseModel:
        try:
            if isinstance(value, str | bytes):
                return model.model_validate_json(value)
            return model.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or model.__name__
            raise InvalidRequestError(f"{where}: {first['msg']}", param=where) from error

    return read


def _request_model(handler: Callable[..., object]) -> type[BaseModel] | None:
    parameter = next(iter(inspect.signature(handler).parameters.values()), None)
    if parameter is None:
        return None
    kind = parameter.annotation
    if isinstance(kind, str):
        kind = _resolved(handler, parameter.name, kind)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _resolved(handler: Callable[..., object], name: str, annotation: str) -> object:
    """Resolve an annotation in text form (PEP 563); None where its name is unknown."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    is_plain = inspect.isfunction(handler) or inspect.ismethod(handler)
    function = inspect.unwrap(handler if is_plain else type(handler).__call__)
    alone = SimpleNamespace(__annotations__={name: annotation})
    try:
        return get_type_hints(alone, globalns=getattr(function, "__globals__", {})).get(name)
    except NameError:  # a name under `if TYPE_CHECKING`: not a model of this process
        return None
