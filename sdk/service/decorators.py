"""`@service` and the decorators of its methods."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from pydantic import BaseModel

from tandem.runtime.errors import ConfigError
from tandem.sdk.service.config import unknown_key
from tandem.sdk.service.dependencies import LINK_ATTRIBUTE, Dependency, link
from tandem.sdk.service.spec import SPEC_ATTRIBUTE, Resources, ServiceSpec, parse_workers

DYNAMO_KEYS = ("namespace", "enabled", "component_type")
_ENDPOINT_ATTRIBUTE = "__tandem_endpoint__"
_HOOKS_ATTRIBUTE = "__tandem_hooks__"

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def service(cls: Class, /) -> Class: ...


@overload
def service(
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
    settings: type[BaseModel] | None = None,
) -> Callable[[Class], Class]: ...


def service(
    cls: Any = None,
    /,
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
    settings: type[BaseModel] | None = None,
) -> Any:
    """Mark a class as a service and return it.

    `dynamo` may hold `namespace` (the cluster's by default), `enabled` (False: it is not started)
    and `component_type` (a label). `resources` may hold `cpu` ("10", "500m"), `memory` ("20Gi") and
    `gpu` ("1") of one instance; `workers` is the number of instances. `settings` is a Pydantic
    model for the values of this class in files and flags. Raise ConfigError.
    """

    def decorate(decorated: Class) -> Class:
        spec = _make_spec(decorated, dynamo or {}, resources or {}, workers, settings)
        setattr(decorated, SPEC_ATTRIBUTE, spec)
        if LINK_ATTRIBUTE not in decorated.__dict__:
            setattr(decorated, LINK_ATTRIBUTE, classmethod(link))
        return decorated

    return decorate if cls is None else decorate(cls)


# ---- methods ----------------------------------------------------------------------------------


@overload
def endpoint(name: Function, /) -> Function: ...


@overload
def endpoint(name: str | None = None) -> Callable[[Function], Function]: ...


def endpoint(name: Any = None) -> Any:
    """Mark a method as an endpoint: `name`, which may hold "/", or the method's own name."""
    if callable(name):
        return _marked(name, name.__name__)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"endpoint name must be a string, not {name!r}", param="name")
    return lambda function: _marked(function, name or function.__name__)


def async_on_start(function: Function) -> Function:
    """Mark a method, async or not, that runs after `__init__` and before the first request."""
    return _hooked(function, "on_start")


def on_shutdown(function: Function) -> Function:
    """Mark a method, async or not, that runs when the last request has ended."""
    return _hooked(function, "on_shutdown")


def liveness(function: Function) -> Function:
    """Mark a method, async or not, for `/healthz`: it returns True while the instance works."""
    return _hooked(function, "liveness")


def readiness(function: Function) -> Function:
    """Mark a method, async or not, for `/readyz`: it returns True when requests can be taken."""
    return _hooked(function, "readiness")


dynamo_endpoint = endpoint


def _marked(function: Any, name: str) -> Any:
    setattr(function, _ENDPOINT_ATTRIBUTE, name)
    return function


def _hooked(function: Function, kind: str) -> Function:
    kinds = getattr(function, _HOOKS_ATTRIBUTE, ())
    setattr(function, _HOOKS_ATTRIBUTE, (*kinds, kind))
    return function


# ---- from a class to its spec -----------------------------------------------------------------


def _make_spec(
    cls: type,
    dynamo: Mapping[str, Any],
    resources: Mapping[str, Any],
    workers: int,
    settings: type[BaseModel] | None,
) -> ServiceSpec:
    where = f"@service of {cls.__name__}"
    for key in dynamo:
        if key not in DYNAMO_KEYS:
            raise unknown_key(f"{where}: dynamo", key, DYNAMO_KEYS)
    members = _members(cls)
    spec = ServiceSpec(
        cls=cls,
        name=cls.__name__,
        namespace=dynamo.get("namespace"),
        is_enabled=bool(dynamo.get("enabled", True)),
        component_type=dynamo.get("component_type"),
        resources=Resources().updated(resources, f"{where}: resources"),
        num_workers=parse_workers(workers, f"{where}: workers"),
        settings_model=settings,
        endpoints=_endpoints(members, where),
        dependencies={k: v.on for k, v in members.items() if isinstance(v, Dependency)},
        hooks=_hooks(members),
    )
    for name in (*spec.endpoints, "endpoint"):
        spec.address(name, "cluster")  # a wrong name is an error here, not at the start
    return spec


def _members(cls: type) -> dict[str, Any]:
    """Return the attributes of a class and its bases, in the order of their definition."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        members |= vars(base)
    return members


def _endpoints(members: Mapping[str, Any], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for attribute, value in members.items():
        name = getattr(value, _ENDPOINT_ATTRIBUTE, None)
        if not inspect.isfunction(value) or name is None:
            continue
        if name in found:
            raise ConfigError(f"{where}: {found[name]} and {attribute} are both endpoint {name!r}")
        found[name] = attribute
    return found


def _hooks(members: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    hooks: dict[str, tuple[str, ...]] = {}
    for attribute, value in members.items():
        if inspect.isfunction(value):
            for kind in getattr(value, _HOOKS_ATTRIBUTE, ()):
                hooks[kind] = (*hooks.get(kind, ()), attribute)
    return hooks
