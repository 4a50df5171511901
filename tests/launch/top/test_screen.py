"""The screen of `tandem top`."""

import msgspec
import pytest
from rich.console import Console

from tandem.launch.top.board import KEEP_GONE_S, Board
from tandem.launch.top.collect import frontend_counts
from tandem.launch.top.keyboard import names
from tandem.launch.top.screen import View, draw
from tests.launch.top.readings import changed, frontend, metrics, reading, worker


def lines(board: Board, now_s: float, view: View | None = None, height: int = 40) -> list[str]:
    console = Console(width=140, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(draw(board, view or View(), now_s, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def line_of(board: Board, now_s: float, words: str) -> str:
    [line] = [line for line in lines(board, now_s) if words in line]
    return " ".join(line.split())


def test_a_worker_has_its_load_and_its_kv() -> None:
    board = Board()
    board.add(0.0, reading(worker("decode-1", num_jobs=4, tp=2), frontend()))
    assert (
        line_of(board, 1.0, "decode-1") == "decode decode-1 m serving 2 ███▒▒▒░░░░░░ 25% 25% 3 2 4"
    )
    assert line_of(board, 1.0, "7000") == "m d1 7 7000 2 1"
    assert "policy threshold" in line_of(board, 1.0, "thresholds")


def test_an_engine_that_reports_no_pool_shows_none() -> None:
    report = worker("decode-1")
    assert report.worker is not None
    load = msgspec.structs.replace(report.worker.load, num_blocks=0, num_free_blocks=0)
    status = msgspec.structs.replace(report.worker, load=load)
    board = Board()
    board.add(0.0, reading(msgspec.structs.replace(report, worker=status)))
    assert line_of(board, 1.0, "decode-1") == "decode decode-1 m serving - - - - 3 2 -"


def test_a_stopped_worker_is_named_with_its_last_load_and_the_time_since() -> None:
    board = Board()
    board.add(0.0, reading(worker("a"), worker("b")))
    board.add(9.0, reading(worker("a"), worker("b", answers=False)))
    assert "no answer within 0.5 s, for 9 s" in line_of(board, 9.0, "no answer within")
    assert line_of(board, 9.0, "no answer within").endswith("25% 25% 3 2 -")
    assert "1 without an answer" in lines(board, 9.0)[0]
    assert board.in_order()[0].report.instance.instance_id == "b"


def test_a_worker_that_left_stays_for_a_while() -> None:
    board = Board()
    board.add(0.0, reading(worker("a"), worker("b")))
    board.add(5.0, reading(worker("a")))
    assert "left the cluster 5 s ago" in line_of(board, 5.0, "left")
    board.add(KEEP_GONE_S + 1, reading(worker("a")))
    assert list(board.members) == ["a"]


def test_latencies_of_the_window_stand_beside_their_targets() -> None:
    board = Board()
    target = worker("a", **{"disagg.ttft_target_ms": 120.0, "disagg.itl_target_ms": 50.0})
    for second, num in ((0.0, 0), (10.0, 100)):
        counts = dict(frontend_counts(metrics(0.15, num)))
        board.add(second, reading(target, frontend(), counts={"front/e1": counts}))
    ttft, itl = board.latencies()
    assert (ttft.kind, ttft.target_ms, ttft.is_missed) == ("ttft", 120.0, True)
    assert ttft.median_ms == pytest.approx(150)
    assert (itl.kind, itl.is_missed) == ("itl", False)
    assert line_of(board, 10.0, "TTFT").endswith("195.0 120.0")


def test_placements_are_counted_by_cause_over_a_new_start() -> None:
    board = Board()
    key, other = ("prompts", "remote", "long"), ("prompts", "local", "queue_full")
    board.add(0.0, reading(worker("a"), counts={"a/e1": {key: 50}}))
    board.add(2.0, reading(worker("a"), counts={"a/e1": {key: 53, other: 1}}))
    again = reading(changed(worker("a"), "e2"), counts={"a/e2": {key: 0}})
    board.add(4.0, again)
    assert board.placements() == [("remote", "long", 3), ("local", "queue_full", 1)]
    assert line_of(board, 4.0, "queue full").endswith("1 25%")


def test_what_cannot_be_read_is_a_line() -> None:
    board = Board()
    board.add(0.0, reading(worker("a"), error="NATS is away"))
    board.problems = ("etcd is away",)
    text = "\n".join(lines(board, 30.0))
    assert "NATS is away" in text and "etcd is away" in text and "30 s old" in text


def test_before_the_first_reading_there_are_the_keys_and_the_problem() -> None:
    board = Board(problems=("etcd is away",))
    assert lines(board, 0.0)[1] == "etcd is away" and "q quit" in lines(board, 0.0)[0]


def test_many_workers_are_scrolled_and_the_figures_stay() -> None:
    board, view = Board(), View()
    board.add(0.0, reading(*(worker(f"w{number:02}") for number in range(50))))
    for _ in range(60):
        view.move(board, 1)
    found = lines(board, 0.0, view, height=24)
    assert len(found) <= 24
    assert any("w49" in line for line in found) and not any("w00" in line for line in found)
    assert any("thresholds" in line for line in found)
    assert any(line.startswith("> decode") and "w49" in line for line in found)
    view.move(board, -49)
    assert any(
        line.startswith("> decode") and "w00" in line for line in lines(board, 0.0, view, 24)
    )


def test_the_selected_process_stays_selected_where_the_order_changes() -> None:
    board, view = Board(), View()
    view.move(board, 1)
    board.add(0.0, reading(worker("a"), worker("b"), worker("c")))
    view.move(board, 1)
    view.move(board, 1)
    board.add(1.0, reading(worker("a"), worker("b", answers=False), worker("c")))
    assert board.in_order()[0].report.instance.instance_id == view.selected == "b"
    view.move(board, 5)
    assert view.selected == "c"


def test_keys_have_names() -> None:
    assert names(b"\x1b[A") == ["up"] and names(b"j") == ["down"]
    assert names(b"jjq") == ["down", "down", "q"]
    assert names(b"\x1b[15~") == [] and names(b"") == ["q"] and names(b"\xff\xfe") == []


def test_a_name_cannot_write_to_the_terminal() -> None:
    board = Board()
    board.add(0.0, reading(worker("\x1b[2Jw\n")))
    board.problems = ("\x1b]0;title\x07",)
    text = "\n".join(lines(board, 0.0))
    assert "\x1b" not in text and "\\x1b[2" in text and "title" in text
