"""The configuration that workers of every role have."""

from dataclasses import dataclass

from tandem.engine.config import EngineConfig
from tandem.queue.config import QueueConfig
from tandem.runtime.config import RuntimeConfig
from tandem.transfer.config import TransferConfig


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The sections of a worker; `model_name` is served from the folder `engine.model`."""

    runtime: RuntimeConfig
    engine: EngineConfig
    transfer: TransferConfig
    queue: QueueConfig
    model_name: str
