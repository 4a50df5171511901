"""Which cluster a process of an author joins, where nobody told it in code."""

import os
from collections.abc import Mapping

from pydantic import ValidationError

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.local_clusters import the_running_cluster
from tandem.runtime.names import config_variables, means_none

PLAIN_VARIABLES = {"NATS_SERVER": "nats_url", "ETCD_ENDPOINTS": "etcd_endpoints"}


def find_cluster(environment: Mapping[str, str] | None = None) -> RuntimeConfig:
    """The cluster of the environment, else the one `tandem serve` runs here, else the defaults.

    Variables are `TANDEM_RUNTIME__<FIELD>` for every field of RuntimeConfig, and `NATS_SERVER` and
    `ETCD_ENDPOINTS` for the two addresses. Raises ConfigError naming the variable that is wrong,
    and when several clusters run on this machine and none is named.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, str | None] = {}
    variables: dict[str, str] = {}
    for name in PLAIN_VARIABLES.keys() & environment.keys():
        values[PLAIN_VARIABLES[name]] = as_url(name, environment[name])
        variables[PLAIN_VARIABLES[name]] = name
    for key, name in config_variables(environment, ["runtime"]):
        section, _, field = key.partition(".")
        if section == "runtime":
            values[field] = None if means_none(environment[name]) else environment[name]
            variables[field] = name
    if not values.keys() & set(PLAIN_VARIABLES.values()):
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


def as_url(name: str, text: str) -> str:
    """Return the addresses of the variable `name`, with a scheme before those that lack one."""
    scheme = "nats" if name == "NATS_SERVER" else "http"
    urls = [url.strip() for url in text.split(",") if url.strip()]
    return ",".join(url if "://" in url else f"{scheme}://{url}" for url in urls)
