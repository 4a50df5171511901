"""`tandem serve`: checks everything that can be checked before the first process starts."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.config.sources import Setting
from tandem.launch.roles import find_model
from tandem.launch.serve.supervisor import ServeOptions, Supervisor
from tandem.launch.serve.topology import load_topology
from tandem.launch.supervise.processes import free_port, require_free_port
from tandem.launch.supervise.reporter import Reporter
from tandem.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """What `tandem serve` was asked for beside the config."""

    model: str
    topology: str
    served_model_name: str | None
    run_dir: Path | None
    verbose: bool
    start_timeout_s: float


def run_serve(config: EffectiveConfig, arguments: ServeArguments) -> int:
    """Serves until a signal; the exit code. Raises TandemError when it cannot."""
    topology = load_topology(arguments.topology)
    frontend = config.config.frontend
    require_free_port(frontend.host, frontend.port, "--port")
    if frontend.port == 0:
        chosen = Setting("frontend.port", free_port(frontend.host), "launcher")
        config = config.with_settings([chosen])
    with Reporter() as reporter:
        reporter.working(f"looking for {arguments.model}")
        folder, name = find_model(config, arguments.model)
        options = ServeOptions(
            config=config,
            topology=topology,
            model=str(folder),
            model_name=arguments.served_model_name or name,
            run_dir=make_run_dir(arguments.run_dir),
            embed_nats=config.origin("runtime.nats_url") == "default",
            embed_etcd=config.origin("runtime.etcd_endpoints") == "default",
            verbose=arguments.verbose,
            start_timeout_s=arguments.start_timeout_s,
        )
        return uvloop.run(Supervisor(options, reporter).run())


def make_run_dir(asked: Path | None) -> Path:
    """The folder for logs and stores, a temporary one by default. Raises ConfigError."""
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="tandem-run-"))
    try:
        asked.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--run-dir {asked}: {exc.strerror}", param="--run-dir") from exc
    return asked.resolve()
