"""What a person sees of workers, whatever these answer: the page, `tandem status`, `tandem top`."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.frontend.ui.collector import _queue, _thresholds
from tandem.frontend.ui.state import worker_state
from tandem.launch.cluster.status import ClusterReport, _instances_table, links, notes
from tandem.launch.top.board import Board
from tandem.launch.top.collect import Reading, worker_counts
from tandem.launch.top.screen import View, draw
from tandem.runtime.membership.instance_report import InstanceReport
from tandem.runtime.process.reporter import wide_console
from tandem.runtime.wire.cluster_messages import Instance, LinkReport, WorkerStatus
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import encode
from tests.router.test_hostile_loads import REPORTS

INSTANCE = Instance("ns", "decode", "generate", "a", "127.0.0.1:1", "e", "m")
NAMES = st.sampled_from(
    ["num_jobs", "num_open_handoffs", "num_queued_jobs", "num_queued_tokens", "disagg.policy",
     "disagg.ttft_target_ms", "prompts.local.short", "num_quarantined_blocks", "excluded"]
)  # fmt: skip
TEXTS = st.sampled_from(["[/a]", "[bold", "\x1b[31m"]) | st.text(max_size=9)
VALUES = (
    TEXTS
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e300, 1e300, allow_nan=False)
)
COUNTS = st.integers(0, 2**48)
AMOUNTS = st.floats(0, 1e300)
LINKS = st.builds(
    LinkReport, TEXTS, TEXTS, TEXTS, AMOUNTS, AMOUNTS,
    st.none() | COUNTS,
)  # fmt: skip
STATUSES = st.builds(
    WorkerStatus,
    st.just(INSTANCE),
    TEXTS,
    REPORTS,
    st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=9),
    st.lists(LINKS, max_size=2),
)


@settings(deadline=None, max_examples=20)
@given(st.lists(STATUSES, min_size=1, max_size=2))
def test_a_worker_is_shown_whatever_it_answers(answers: list[WorkerStatus]) -> None:
    board, console = Board(), wide_console()
    for second, answer in enumerate(answers):
        status = decoder(WorkerStatus)(encode(answer))
        report = InstanceReport(INSTANCE, status.state, status)
        msgspec.json.encode(worker_state(report, status, 0.0, is_gone=False))
        msgspec.json.encode((_queue(status), _thresholds(status)))
        cluster = ClusterReport("ns", "etcd", "nats", [report], [], {})
        board.add(second, Reading(cluster, {"a/e": worker_counts(report)}, ()))
        with console.capture():
            console.print(_instances_table([report]), *notes(report), *links(cluster))
            console.print(draw(board, View(), second + 0.5, 40))
