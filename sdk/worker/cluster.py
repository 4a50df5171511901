"""Which cluster a process of an author joins, where nobody told it in code."""

import os
from collections.abc import Mapping

from pydantic import ValidationError

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.local_clusters import the_running_cluster

_PREFIX = "TANDEM_RUNTIME__"
_NEAR_PREFIX = "TANDEM_RUNTIME_"
_NONE_WORDS = ("null", "none", "~", "")
_PLAIN_VARIABLES = {"NATS_SERVER": "nats_url", "ETCD_ENDPOINTS": "etcd_endpoints"}


def find_cluster(environment: Mapping[str, str] | None = None) -> RuntimeConfig:
    """The cluster of the environment, else the one `tandem serve` runs here, else the defaults.

    Variables are `TANDEM_RUNTIME__<FIELD>` for every field of RuntimeConfig, and `NATS_SERVER` and
    `ETCD_ENDPOINTS` for the two addresses. Raises ConfigError naming the variable that is wrong,
    and when several clusters run on this machine and none is named.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, str | None] = {}
    variables: dict[str, str] = {}
    for name in _PLAIN_VARIABLES.keys() & environment.keys():
        values[_PLAIN_VARIABLES[name]] = _as_url(name, environment[name])
        variables[_PLAIN_VARIABLES[name]] = name
    for name in sorted(environment):
        if name.startswith(_NEAR_PREFIX) and not name.startswith(_PREFIX):
            meant = _PREFIX + name.removeprefix(_NEAR_PREFIX)
            raise ConfigError(f"environment variable {name}: did you mean {meant}?", param=name)
        if name.startswith(_PREFIX):
            field = name.removeprefix(_PREFIX).lower()
            is_none = environment[name].strip().lower() in _NONE_WORDS
            values[field] = None if is_none else environment[name]
            variables[field] = name
    if not values.keys() & set(_PLAIN_VARIABLES.values()):
        cluster = the_running_cluster()
        if cluster is not None:
            values = {**cluster.runtime_values(), **values}
    try:
        return RuntimeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        name = variables.get(field, field)
        raise ConfigError(f"environment variable {name}: {first['msg']}", param=name) from error


def _as_url(name: str, text: str) -> str:
    """Addresses may come without a scheme, as in `ETCD_ENDPOINTS=localhost:2379`."""
    scheme = "nats" if name == "NATS_SERVER" else "http"
    urls = [url.strip() for url in text.split(",") if url.strip()]
    return ",".join(url if "://" in url else f"{scheme}://{url}" for url in urls)
