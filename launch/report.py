"""The members of a cluster as `tandem status` found them."""

import msgspec

from tandem.runtime.messages import Instance, WorkerStatus


class InstanceReport(msgspec.Struct, frozen=True):
    """One process; `worker` is None for a frontend, and for a worker that did not answer."""

    instance: Instance
    state: str
    worker: WorkerStatus | None = None

    @property
    def role(self) -> str:
        """The component that was registered, or `both` for a worker with two of them."""
        has_both = self.worker is not None and self.worker.load.role == "both"
        return "both" if has_both else self.instance.component
