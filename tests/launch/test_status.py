"""What `tandem status` says of a worker beside its numbers."""

from tandem.launch.status import InstanceReport, notes
from tandem.runtime.messages import Instance, LoadReport, WorkerStatus

INSTANCE = Instance("tandem", "decode", "generate", "0123456789abcdef", "127.0.0.1:1", "e1")
LOAD = LoadReport("0123456789abcdef", "e1", "decode", 0, 0, 0, 10, 10, 0)


def report(**details: str | int) -> InstanceReport:
    return InstanceReport(INSTANCE, "serving", WorkerStatus(INSTANCE, "serving", LOAD, details))


def test_quarantined_blocks_and_excluded_peers_are_pointed_out() -> None:
    first, second = notes(report(num_quarantined_blocks=4, excluded="fedcba98"))
    assert first.startswith("decode 01234567: 4 blocks in quarantine")
    assert "no KV from fedcba98" in second


def test_a_worker_that_is_well_or_silent_needs_no_note() -> None:
    assert notes(report(num_quarantined_blocks=0, excluded="")) == []
    assert notes(report()) == []
    assert notes(InstanceReport(INSTANCE, "no answer: lost")) == []
