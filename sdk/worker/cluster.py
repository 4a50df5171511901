"""The cluster that the process of an author joins without a config of its own."""

import os
from collections.abc import Mapping

from pydantic import ValidationError

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.local_clusters import running_cluster_at, the_running_cluster
from tandem.runtime.process.names import config_variables, means_none

ADDRESSES = ("nats_url", "etcd_endpoints")


def find_cluster(environment: Mapping[str, str] | None = None) -> RuntimeConfig:
    """The cluster of the environment, else the one `tandem serve` runs here, else the defaults.

    Variables are `TANDEM_RUNTIME__<FIELD>` for every field of RuntimeConfig, `NATS_SERVER` and
    `ETCD_ENDPOINTS` for the two addresses, and `DYN_LOG`. Raise ConfigError naming the variable
    that is wrong, and when several clusters run on this machine and none is named.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, str | None] = {}
    variables: dict[str, str] = {}
    for key, name, text in config_variables(environment, ["runtime"]):
        section, _, field = key.partition(".")
        if section == "runtime":
            values[field] = None if means_none(text) else text
            variables[field] = name
    cluster = None
    if etcd_endpoints := values.get("etcd_endpoints"):
        cluster = running_cluster_at(etcd_endpoints, values.get("namespace"))
    elif not values.keys() & set(ADDRESSES):
        cluster = the_running_cluster(values.get("namespace"))
    if cluster is not None:
        values = {**cluster.runtime_values(), **values}
    try:
        return RuntimeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        name = variables.get(field, field)
        raise ConfigError(f"environment variable {name}: {first['msg']}", param=name) from error
