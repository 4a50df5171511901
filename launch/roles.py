"""One role in this process: checks what it was told, then hands over to the role's own room."""

import os
from pathlib import Path

import uvloop

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.config.sources import Setting
from tandem.launch.devices import device_for
from tandem.launch.supervise.processes import require_free_port
from tandem.models.paths import BUNDLED_MODEL_NAME, resolve_model
from tandem.runtime.logs import setup_logging

# For how long a compute thread waits for work without sleeping: some 50 us, what lies between
# two operations of a step and no more. By default OpenMP waits up to 5 ms, on a core
# that the frontend could use.
SPIN_COUNT = 3_000


def run_frontend_role(effective: EffectiveConfig) -> None:
    """Blocks until a signal ends the frontend."""
    config = effective.config
    require_free_port(config.frontend.host, config.frontend.port, "--port")
    setup_logging(config.runtime.log_level, "frontend")
    from tandem.frontend.server import run_frontend

    uvloop.run(run_frontend(config.frontend, config.runtime, config.router))


def run_prefill_role(
    effective: EffectiveConfig, model: str, gpu: str | None, served_name: str | None
) -> None:
    """Blocks until a signal ends the worker."""
    effective, name = prepare_worker(effective, model, gpu, served_name)
    config = effective.config
    setup_logging(config.runtime.log_level, "prefill")
    from tandem.prefill.worker import run_prefill

    uvloop.run(
        run_prefill(
            runtime=config.runtime,
            engine=config.engine,
            transfer=config.transfer,
            queue=config.queue,
            prefill=config.prefill,
            model_name=name,
        )
    )


def run_decode_role(
    effective: EffectiveConfig, model: str, gpu: str | None, served_name: str | None
) -> None:
    """Blocks until a signal ends the worker."""
    effective, name = prepare_worker(effective, model, gpu, served_name)
    config = effective.config
    setup_logging(config.runtime.log_level, "decode")
    from tandem.decode.worker import run_decode

    uvloop.run(
        run_decode(
            runtime=config.runtime,
            engine=config.engine,
            transfer=config.transfer,
            queue=config.queue,
            disagg=config.disagg,
            model_name=name,
        )
    )


def prepare_worker(
    effective: EffectiveConfig, model: str, gpu: str | None, served_name: str | None
) -> tuple[EffectiveConfig, str]:
    """The config with its model's folder and its device in it, and the name clients ask for.

    Raises ModelError without that model, ConfigError without that GPU.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read when PyTorch is loaded
    settings: list[Setting] = []
    if gpu is not None:
        settings.append(Setting("engine.device", device_for(gpu), "--gpu"))
    elif (device := effective.config.engine.device).startswith("cuda:"):
        device_for(device.removeprefix("cuda:"))
    folder, name = find_model(effective, model)
    settings.append(Setting("engine.model", str(folder), "MODEL"))
    return effective.with_settings(settings), served_name or name


def find_model(effective: EffectiveConfig, model: str) -> tuple[Path, str]:
    """The folder of a model, downloaded if it must be, and the name it is served under.

    `bundled` stands for engine.model where that is set, and for the bundled model where not.
    """
    if model == "bundled":
        model = effective.config.engine.model or BUNDLED_MODEL_NAME
    if model == "bundled":
        model = BUNDLED_MODEL_NAME
    is_folder = Path(model).expanduser().is_dir()
    folder = resolve_model(model)
    return folder, folder.name if is_folder else model
