import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec
import psutil
import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.local_clusters import LocalCluster, announced, started_s
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.discovery import config_key, model_key
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import ModelCard
from tests.launch.conftest import Tandem

KEY = "disagg.max_local_prefill_length"


async def stored(config: RuntimeConfig) -> bytes | None:
    async with started(EtcdDiscovery(config)) as discovery:
        key = config_key(config.namespace, KEY)
        return (await discovery.get_prefix(key)).get(key)


async def serve(config: RuntimeConfig, model: str) -> None:
    """Put a model's card, as a worker of it does."""
    async with started(EtcdDiscovery(config)) as discovery:
        card = ModelCard(model, 1000, 16, 256, "", "a", 0)
        key = model_key(config.namespace, model, "a")
        await discovery.put_config(key, msgspec.json.encode(card))


def cluster_of(launcher: psutil.Process, config: RuntimeConfig, run_dir: Path) -> LocalCluster:
    return LocalCluster(
        pid=launcher.pid,
        started_s=started_s(launcher.pid),
        namespace=config.namespace,
        nats_url=config.nats_url,
        etcd_endpoints=config.etcd_endpoints,
        http_url="",
        run_dir=str(run_dir),
    )


def test_a_value_that_is_set_is_read_back_and_shown_as_live(
    tandem: Tandem, joined: list[str], runtime_config: RuntimeConfig
) -> None:
    code, output, errors = tandem("config", "set", KEY, "512", *joined)
    assert (code, output, errors) == (0, f"{KEY} = 512 (was 1000)\n", "")
    assert tandem("config", "get", KEY, *joined)[:2] == (0, "512\n")
    shown = json.loads(tandem("config", "show", "--json", *joined)[1])
    path = config_key(runtime_config.namespace, KEY)
    assert shown[KEY] == {"value": 512, "origin": f"live, etcd {path}"}
    assert tandem("config", "unset", KEY, *joined)[0] == 0
    assert tandem("config", "get", KEY, *joined)[:2] == (0, "1000\n")


def test_a_value_for_one_model_goes_before_that_of_all(
    tandem: Tandem, joined: list[str], runtime_config: RuntimeConfig
) -> None:
    own = ("--model", "org/a model")
    code, _, errors = tandem("config", "set", KEY, "5", *own, *joined)
    assert code == 2 and "--model org/a model: no worker serves it; served: none" in errors
    asyncio.run(serve(runtime_config, "org/a model"))
    asyncio.run(serve(runtime_config, "other"))
    tandem("config", "set", KEY, "512", *joined)
    code, output, errors = tandem("config", "set", KEY, "5", *own, *joined)
    assert (code, output, errors) == (0, f"{KEY} = 5 (was 512) for org/a model\n", "")
    assert tandem("config", "get", KEY, *own, *joined)[1] == "5\n"
    assert tandem("config", "get", KEY, *joined)[1] == "512\n"
    assert tandem("config", "get", KEY, "--model", "other", *joined)[1] == "512\n"
    assert json.loads(tandem("config", "show", "--json", *own, *joined)[1])[KEY]["value"] == 5
    _, _, errors = tandem("config", "set", KEY, "5", "--model", "othr", *joined)
    assert "served: org/a model, other" in errors
    output = tandem("config", "unset", KEY, *own, *joined)[1]
    assert output == f"{KEY} is no longer set in the cluster for org/a model\n"
    assert tandem("config", "get", KEY, *own, *joined)[1] == "512\n"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (KEY, "-1", "greater than or equal to 0"),
        (KEY, "many", "valid integer"),
        (KEY, "9" * 30, "less than or equal to 268435456"),
        ("disagg.claim_timeout_ms", "9" * 19, "less than or equal to 3600000"),
        ("disagg.handoff_timeout_ms_per_token", "inf", "less than or equal to 10000"),
        ("disagg.handoff_timeout_ms_per_token", "nan", "less than or equal to 10000"),
        ("disagg.policy", "sometimes", "'always_local'"),
        ("disagg.max_local_prefil_length", "5", f"did you mean {KEY}"),
        ("engine.block_size", "32", "read at the start only"),
    ],
)
def test_a_bad_live_value_is_refused_with_the_reason_and_changes_nothing(
    tandem: Tandem, joined: list[str], key: str, value: str, reason: str
) -> None:
    code, output, errors = tandem("config", "set", key, value, *joined)
    assert code == 2
    assert reason in errors
    assert output == ""
    assert tandem("config", "get", KEY, *joined)[1] == "1000\n"


def test_a_value_is_stored_as_json(
    tandem: Tandem, joined: list[str], runtime_config: RuntimeConfig
) -> None:
    tandem("config", "set", KEY, "64", *joined)
    assert asyncio.run(stored(runtime_config)) == b"64"


def test_watch_prints_every_change_as_it_comes(
    tandem: Tandem, joined: list[str], runtime_config: RuntimeConfig
) -> None:
    tandem("config", "set", "disagg.policy", "threshold", *joined)
    command = [sys.executable, "-P", "-m", "tandem.launch", "config", "watch", *joined]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            lines: IO[str] | None = watcher.stdout
            assert lines is not None
            assert lines.readline() == 'disagg.policy = "threshold"\n'
            tandem("config", "set", KEY, "7", *joined)
            assert lines.readline() == f"{KEY} = 7\n"
            tandem("config", "unset", KEY, *joined)
            assert lines.readline() == f"{KEY} is unset\n"
            asyncio.run(serve(runtime_config, "org/a model"))
            tandem("config", "set", KEY, "8", "--model", "org/a model", *joined)
            assert lines.readline() == f"{KEY} for org/a model = 8\n"
        finally:
            watcher.terminate()


@pytest.mark.parametrize("source", ["default", "file", "flag", "environment"])
def test_a_value_of_any_source_is_not_shown_as_if_it_were_in_force(
    source: str,
    tandem: Tandem,
    runtime_config: RuntimeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run").mkdir()
    started = f"engine: {{max_num_seqs: 8}}\ndisagg: {{{KEY.partition('.')[2]}: 5}}\n"
    (tmp_path / "run" / "decode-0.yaml").write_text(started)
    file = tmp_path / "tandem.yaml"
    file.write_text(started.replace("8", "16") if source == "file" else "")
    flags = ["--engine.max_num_seqs=16", f"--{KEY}=5"] if source == "flag" else []
    if source == "environment":
        monkeypatch.setenv("TANDEM_ENGINE__MAX_NUM_SEQS", "16")
        monkeypatch.setenv("TANDEM_DISAGG__MAX_LOCAL_PREFILL_LENGTH", "5")
    with announced(cluster_of(psutil.Process(), runtime_config, tmp_path / "run")):
        shown = json.loads(tandem("config", "show", "--json", "--config", str(file), *flags)[1])
    seqs = shown["engine.max_num_seqs"]
    mark = ", not in force: the cluster was started with "
    assert (seqs["value"] == 16) is (source != "default")
    assert seqs["origin"].endswith(f"{mark}8")
    origins = {
        "default": f"default{mark}5",
        "file": f"{file}:2",
        "flag": f"flag --{KEY}",
        "environment": "TANDEM_DISAGG__MAX_LOCAL_PREFILL_LENGTH",
    }
    assert shown[KEY]["origin"] == origins[source]
    assert shown["engine.block_size"]["origin"] == "default"


def test_the_advice_for_two_clusters_can_be_followed(
    tandem: Tandem, runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    process = psutil.Process()
    parent = process.parent()
    assert parent is not None
    with contextlib.ExitStack() as stack:
        for launcher in (process, parent):
            stack.enter_context(announced(cluster_of(launcher, runtime_config, tmp_path)))
        code, _, errors = tandem("config", "set", KEY, "512")
        assert code == 2
        advice = errors.partition("names one:")[2].partition(" (")[0]
        assert tandem("config", "set", KEY, "512", *advice.split())[0] == 0
    assert asyncio.run(stored(runtime_config)) == b"512"


def test_etcd_that_is_not_there_is_named(tandem: Tandem) -> None:
    address = "http://127.0.0.1:9"
    code, _, errors = tandem("config", "get", KEY, "--etcd-endpoints", address)
    assert code == 1
    assert errors.startswith(f"error: etcd not reachable at {address}")
