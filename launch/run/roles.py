"""A worker in this process: its config is completed and checked, then its room runs it."""

import os
from pathlib import Path

import uvloop

from tandem.config.model import EffectiveConfig
from tandem.config.sources import Setting
from tandem.decode.config import DisaggConfig
from tandem.emulation.profile import load_profile
from tandem.engine.execution.model_code import choose_model_config
from tandem.launch.run.options import ModelOptions
from tandem.models.paths import BUNDLED_MODEL_NAME, resolve_model
from tandem.prefill.config import PrefillConfig
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.devices import device_for
from tandem.runtime.membership.model_files import read_model_files
from tandem.runtime.membership.node import Node
from tandem.runtime.process.logs import setup_logging
from tandem.runtime.store.progress_report import reported
from tandem.runtime.wire.cluster_messages import WorkerRole
from tandem.worker.settings import WorkerSettings

# How long a compute thread spins before it sleeps: some 50 us, the time between two operations of
# a step and no more. By default OpenMP spins up to 5 ms, on a core that the frontend could use.
SPIN_COUNT = 3_000


def run_worker_role(
    role: WorkerRole, effective: EffectiveConfig, model: ModelOptions, gpu: str | None
) -> None:
    """Block until a signal ends the worker, which begins in `role`.

    Raise ServiceError without NATS and etcd, before a model is downloaded or loaded.
    """
    effective = prepare_worker(effective, gpu)
    uvloop.run(_reach_services(effective.config.runtime, role))
    runtime = effective.config.runtime
    component = "worker" if role == "both" else role
    setup_logging(runtime.log_level, component, format=runtime.log_format)
    with reported(runtime, component, model.model):
        folder, model_name = find_model(effective, model)
    config = effective.with_settings([Setting("engine.model", str(folder), "MODEL")]).config
    settings = WorkerSettings(
        config.runtime, config.engine, config.transfer, config.queue, model_name
    )
    uvloop.run(_run_worker(role, settings, config.disagg, config.prefill))


async def _run_worker(
    role: WorkerRole, settings: WorkerSettings, disagg: DisaggConfig, prefill: PrefillConfig
) -> None:
    from tandem.decode.worker import DecodeRole
    from tandem.prefill.worker import PrefillRole
    from tandem.worker.worker import Worker

    files = read_model_files(Path(settings.engine.model))
    with reported(settings.runtime, role, settings.model_name):
        worker = Worker(settings, role)
    await worker.run(DecodeRole(worker, disagg, files), PrefillRole(worker, prefill))


def prepare_worker(effective: EffectiveConfig, gpu: str | None) -> EffectiveConfig:
    """Return the config with the device in it. Raise ConfigError without that GPU."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read when PyTorch is loaded
    if gpu is not None:
        return effective.with_settings([Setting("engine.device", device_for(gpu), "--gpu")])
    if (device := effective.config.engine.device).startswith("cuda:"):
        device_for(device.removeprefix("cuda:"))
    return effective


async def _reach_services(runtime: RuntimeConfig, role: str) -> None:
    """Connect to NATS and etcd, and leave. Raise ServiceError naming the address."""
    async with Node(runtime, component=role, serves=False):
        pass


def find_model(effective: EffectiveConfig, options: ModelOptions) -> tuple[Path, str]:
    """Return the folder of a model, downloaded where necessary, and its served name.

    `bundled` stands for engine.model where that is set, else for the bundled model. Raise
    ModelError without that model, and for one that the engine does not run; ConfigError for a
    profile that does not exist.
    """
    model = options.model
    if model == "bundled":
        model = effective.config.engine.model or model
    if model == "bundled":
        model = BUNDLED_MODEL_NAME
    is_folder = Path(model).expanduser().is_dir()
    folder = resolve_model(model)
    choose_model_config(folder, effective.config.engine.model_impl)
    name = folder.name if is_folder else model
    if (profile := effective.config.engine.emulate) is not None:
        load_profile(profile)
        if model == BUNDLED_MODEL_NAME:  # it lends its tokenizer
            name = Path(profile).name.removesuffix(".yaml")
    return folder, options.served_model_name or name
