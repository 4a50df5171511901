"""A process that serves one instance of a service.

    python -m tandem.sdk.service.process graphs.chat:Frontend --service Backend

`tandem run` starts one process for every instance of a graph.
"""

import argparse
import sys
from collections.abc import Sequence

import uvloop

from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.process.logs import setup_logging
from tandem.sdk.service.config import unknown_key
from tandem.sdk.service.dependencies import graph_of
from tandem.sdk.service.instance import serve_service
from tandem.sdk.service.spec import spec_of
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.decorators import worker
from tandem.sdk.worker.distributed_runtime import DistributedRuntime
from tandem.sdk.worker.targets import load_class


@worker
async def _run(runtime: DistributedRuntime, cls: type, graph: Sequence[type]) -> None:
    await serve_service(runtime, cls, graph=graph)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal. Blocks. Print a TandemError as one line and exit with status 1."""
    parser = argparse.ArgumentParser(prog="tandem.sdk.service.process", description=__doc__)
    parser.add_argument("graph", help="module:Class, the entry of the graph")
    parser.add_argument("--service", help="which service of it; by default the entry itself")
    arguments = parser.parse_args(argv)
    try:
        entry = load_class(arguments.graph)
        graph = {spec.name: spec.cls for spec in graph_of(entry)}
        name = arguments.service or spec_of(entry).name
        if name not in graph:
            raise unknown_key("--service", name, graph)
        cluster = find_cluster()
        setup_logging(cluster.log_level, name, format=cluster.log_format)
        uvloop.run(_run(graph[name], list(graph.values())))
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


if __name__ == "__main__":
    main()
