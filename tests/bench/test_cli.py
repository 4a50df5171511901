import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from tandem.bench.cli import main
from tandem.bench.load.options import BenchOptions
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.local.local_clusters import LocalCluster, announced, started_s
from tests.bench.load.sse_server import (
    Answer,
    Exchange,
    SseServer,
    answer_in_full,
    answer_with_timeline,
    serving,
)
from tests.processes import output_of


@dataclass
class Outcome:
    code: object
    out: str
    err: str


Bench = Callable[..., Outcome]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        try:
            code: object = main()
        except SystemExit as ended:  # of the parser of options
            code = ended.code
        return Outcome(code, *capsys.readouterr())

    return run


@contextmanager
def server_beside(answer: Answer = answer_in_full) -> Iterator[SseServer]:
    """A server on a loop in a thread of its own."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(answer)) as server,
    ):
        yield server


def test_a_run_shows_percentiles_and_writes_json_and_a_picture(
    bench: Bench, tmp_path: Path
) -> None:
    output, plot = tmp_path / "results.json", tmp_path / "out.png"
    with server_beside() as server:
        outcome = bench(
            *("--url", server.url, "--concurrency", "4", "--num-requests", "12"),
            *("--input-tokens", "32", "--output-tokens", "5", "--prefill", "remote"),
            *("--goodput", "ttft:5000", "tpot:5000", "--records"),
            *("--output", str(output), "--plot", str(plot)),
        )
        bodies = server.bodies
        placement = server.exchanges[-1].headers["x-tandem-prefill"]
    assert outcome.code == 0, outcome.err
    assert "prefilled remotely (" not in outcome.out  # this server sends no timelines
    assert "prediction  " not in outcome.out
    for text in ("time to first token", "p99", "12 of 12 succeeded", "goodput", "Definitions"):
        assert text in outcome.out
    results = json.loads(output.read_text())
    assert results["summary"]["num_output_tokens"] == 60
    assert results["summary"]["goodput_share"] == 1.0
    assert results["summary"]["prefill_places"] == {"local": 12}
    assert results["settings"]["plan"]["concurrency"] == 4
    assert results["how"]["tpot"]
    assert results["command"][-1] == str(plot)
    assert results["machine"]["num_cpus"] > 0
    first = results["requests"][0]
    assert {"scheduled_s", "sent_s", "output_times_s", "end_s"} <= first.keys()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert placement == "remote"
    assert len(bodies) == 14  # two of them to warm up
    assert all(len(body["prompt"]) == 32 and body["max_tokens"] == 5 for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) == 14


def test_without_an_address_it_is_what_is_served_on_this_machine(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with server_beside() as server:

        def cluster(pid: int, url: str) -> LocalCluster:
            run_dir = str(tmp_path)
            return LocalCluster(pid, started_s(pid), "test", "nats://x", "http://x", url, run_dir)

        with announced(cluster(os.getpid(), server.url)):
            outcome = bench("--num-requests", "2", "--output-tokens", "2")
            with announced(cluster(os.getppid(), "http://127.0.0.1:9")):
                refused = bench("--num-requests", "2")
    assert outcome.code == 0 and server.url in outcome.out, outcome.err
    assert refused.code != 0
    assert "choose one: --url" in refused.err and server.url in refused.err


def test_the_frontend_of_a_config_file_is_measured(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    with server_beside() as server:
        file.write_text(f"frontend: {{port: {server.url.rpartition(':')[2]}}}")
        outcome = bench("--config", str(file), "--num-requests", "2", "--output-tokens", "2")
    assert outcome.code == 0 and server.url in outcome.out, outcome.err


def test_a_trace_beyond_the_context_is_refused_before_a_request(
    bench: Bench, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 900, "output_length": 10}\n')

    async def answer(exchange: Exchange) -> None:
        if exchange.body is None:
            await exchange.send_json(200, {"data": [{"id": "m", "max_model_len": 512}]})
        else:
            await answer_in_full(exchange)

    with server_beside(answer) as server:
        for model in ([], ["--model", "m"]):
            outcome = bench("--url", server.url, "--trace", str(trace), *model)
            assert outcome.code == 2
            assert "512 tokens" in outcome.err and "--max-input-tokens 502" in outcome.err
        assert server.bodies == []


def test_a_sweep_is_a_page_with_its_curves_beside_an_earlier_one(
    bench: Bench, tmp_path: Path
) -> None:
    earlier, report = tmp_path / "before.json", tmp_path / "out.html"
    load = ("--num-requests", "6", "--input-tokens", "8", "--output-tokens", "2", "--warmup", "0")
    with server_beside(answer_with_timeline) as server:
        sweep = ("--url", server.url, *load, "--sweep-rates", "50", "100")
        first = bench(*sweep, "--output", str(earlier), "--records")
        second = bench(*sweep, "--against", str(earlier), "--report", str(report))
    assert (first.code, second.code) == (0, 0), second.err
    assert "100%" in first.out and "prefill at 50 requests/s:\n" in first.out
    assert first.out.count("6 x remote: uncached N > max_local_prefill_length N") == 2
    points = json.loads(earlier.read_text())["sweep"]
    assert [point["request_rate"] for point in points] == [50.0, 100.0]
    page = report.read_text()
    assert "Goodput against rate" in page and "before: answered" in page
    assert "before: 50 requests/s" in page and page.endswith("</html>")


def test_two_servers_are_compared_in_turns_with_the_same_load(bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    order: list[str] = []

    def named(name: str):  # type: ignore[no-untyped-def]
        async def answer(exchange: Exchange) -> None:
            if exchange.body is not None:
                order.append(name)
            await answer_in_full(exchange)

        return answer

    with server_beside(named("A")) as a, server_beside(named("B")) as b:
        outcome = bench(
            *("--url", a.url, "--compare-url", b.url, "--rounds", "2", "--warmup", "1"),
            *("--num-requests", "3", "--input-tokens", "20", "--input-stddev", "5"),
            *("--seed", "7", "--output", str(output)),
        )
        lengths = [[len(body["prompt"]) for body in server.bodies] for server in (a, b)]
        prompts = {str(body["prompt"]) for server in (a, b) for body in server.bodies}
    assert outcome.code == 0, outcome.err
    assert "".join(order) == "AAAABBBBAAABBB"  # a warm-up each, then A B A B
    assert lengths[0] == lengths[1]
    assert len(prompts) == 14
    metrics = json.loads(output.read_text())["comparison"]["metrics"]
    assert len(metrics["ttft p50"]["ratios"]) == 2
    assert "B/A" in outcome.out
    assert "prefix cache" in outcome.err  # the seed is fixed


def test_breakdowns_are_compared_and_a_server_without_one_is_no_obstacle(
    bench: Bench,
    tmp_path: Path,
) -> None:
    output = tmp_path / "results.json"
    with server_beside() as plain, server_beside(answer_with_timeline) as telling:
        outcome = bench(
            *("--url", plain.url, "--compare-url", telling.url, "--rounds", "2", "--warmup", "0"),
            *("--num-requests", "2", "--output", str(output)),
        )
    assert outcome.code == 0, outcome.err
    assert "prefilled remotely (A 0, B 4 requests)" in outcome.out
    assert "B round 2: 2 of 2 succeeded; prefill 2 remote (100% remote)" in outcome.out
    assert "4 x remote: uncached N > max_local_prefill_length N" in outcome.out
    breakdown = json.loads(output.read_text())["comparison"]["breakdown_ms"]
    assert breakdown["A"] == {}
    remote = breakdown["B"]["remote"]
    assert remote["first_step"]["num_samples"] == 4
    assert (remote["queue"]["p50"], remote["verification"]["p99"]) == (3.0, 0.5)


def test_the_error_of_predicted_first_tokens_is_shown_where_the_server_sends_them(
    bench: Bench,
    tmp_path: Path,
) -> None:
    output = tmp_path / "results.json"
    with server_beside(answer_with_timeline) as server:
        outcome = bench("--url", server.url, "--num-requests", "3", "--output", str(output))
    assert outcome.code == 0, outcome.err
    line = "prediction  of 3 first tokens: median error 20.0%, 100.0% within 50 %"
    assert line in outcome.out
    errors = json.loads(output.read_text())["summary"]["prediction"]
    assert errors == {"num_samples": 3, "median": pytest.approx(0.2), "share_within_half": 1.0}


def test_a_run_that_fails_altogether_has_an_exit_code(bench: Bench) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send_json(503, {"error": {"message": "no worker", "code": "unavailable"}})

    with server_beside(answer) as server:
        outcome = bench("--url", server.url, "--model", "m", "--num-requests", "3")
    assert outcome.code == 1
    assert "3 x http_503 unavailable, the first: no worker" in outcome.out


async def test_ctrl_c_shows_what_was_measured_so_far(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    reached = asyncio.Event()
    num_seen = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal num_seen
        num_seen += exchange.body is not None
        if num_seen > 6:
            reached.set()
            await asyncio.Event().wait()
        await answer_in_full(exchange)

    async with serving(answer) as server:
        process = await ChildProcess.start_piped(
            [
                *(sys.executable, "-m", "tandem.bench.cli", "--url", server.url),
                *("--warmup", "0", "--output", str(output)),
            ],
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, "COLUMNS": "200"},
        )
        async with asyncio.timeout(60):
            await reached.wait()
        process.signal(signal.SIGINT)
        async with asyncio.timeout(60):
            shown, _ = await output_of(process)
    assert process.exit_code == 130
    assert b"6 of 7 succeeded" in shown
    results = json.loads(output.read_text())
    assert results["interrupted"] is True
    assert results["summary"]["num_unfinished"] == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--endpoint", "chat", "--input-format", "tokens"], "chat takes text"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--api-key-env", "TANDEM_NO_SUCH_KEY"], "TANDEM_NO_SUCH_KEY"),
        (["--compare", "disagg.policy=always_local", "disagg.policy=maybe"], "maybe"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_two(
    bench: Bench, arguments: list[str], reason: str
) -> None:
    with server_beside() as server:
        outcome = bench("--url", server.url, *arguments)
    assert outcome.code == 2
    assert reason in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sweep_rates": (2.0, 0.0)}, "above 0"),
        ({"sweep_rates": (float("nan"),)}, "a sweep goes to"),
        ({"sweep_concurrencies": (10**9,)}, "a sweep goes to"),
        ({"sweep_rates": (2.0,), "concurrency": 3}, "its own loads"),
        ({"sweep_rates": (2.0,), "sweep_concurrencies": (2,)}, "choose"),
        ({"against": Path("before.json")}, "--report"),
    ],
)
def test_a_sweep_or_an_earlier_run_that_makes_no_sense_is_refused(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        BenchOptions(**options)
