"""The steps of a worker's process before its libraries are loaded."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.config.model import load_config
from tandem.config.sources import Setting
from tandem.launch.run.options import ModelOptions
from tandem.launch.run.roles import SPIN_COUNT, find_model, prepare_worker
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError


def test_compute_threads_wait_briefly_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    prepare_worker(load_config(), None)
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    prepare_worker(load_config(), None)
    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_COUNT)


def test_a_worker_loads_no_compilers_and_no_parts_of_a_frontend() -> None:
    """PyTorch's import alone is more than half of a worker's memory beside pool and weights."""
    rooms = ["decode.worker", "prefill.worker", "engine.execution.model_runner"]
    imports = ", ".join(f"tandem.{room}" for room in ["launch.run.roles", *rooms])
    script = f"import sys, {imports}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, check=True)
    loaded = done.stdout.decode().split()
    assert "torch" in loaded
    compilers = ("sympy", "networkx", "torch._dynamo", "torch._inductor", "triton", "transformers")
    of_frontends = ("tandem.frontend.serving", "starlette", "uvicorn", "tokenizers", "jinja2")
    assert [each for each in loaded if each.startswith((*compilers, *of_frontends))] == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("service", ["nats", "etcd"])
def test_a_mistyped_address_is_named_before_the_model_is_looked_for(
    tandem: Callable[..., tuple[int, str, str]],
    runtime_config: RuntimeConfig,
    role: str,
    service: str,
) -> None:
    urls = {"nats": runtime_config.nats_url, "etcd": runtime_config.etcd_endpoints}
    scheme = urls[service].partition("://")[0]
    urls[service] = f"{scheme}://127.0.0.1:9"
    code, _, errors = tandem(
        *(role, "no/such/model", "--runtime.connect_attempts=1"),
        *("--nats-url", urls["nats"], "--etcd-endpoints", urls["etcd"]),
    )
    assert code == 1
    assert f"not reachable at {scheme}://127.0.0.1:9" in errors.splitlines()[-1]


def test_a_model_that_the_engine_does_not_run_is_refused_before_anything_is_started(
    tandem: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["T5Model"], "is_encoder_decoder": true}'
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    run_dir = tmp_path / "run"
    code, _, errors = tandem("serve", str(tmp_path), "--port", "0", "--run-dir", str(run_dir))
    assert code == 1
    assert f"error: {tmp_path}/config.json: architectures: 'T5Model'" in errors
    assert not run_dir.exists()


def test_an_emulated_model_has_the_name_of_its_profile_and_a_bad_profile_is_named_at_once(
    tmp_path: Path,
) -> None:
    def found(profile: str, *names: str) -> tuple[Path, str]:
        config = load_config().with_settings([Setting("engine.emulate", profile, "--emulate")])
        return find_model(config, ModelOptions(*names))

    assert found("h100/llama-3.1-8b") == (BUNDLED_MODEL, "llama-3.1-8b")
    assert found("h100/llama-3.1-8b", "bundled", "mine")[1] == "mine"
    own = tmp_path / "own"
    shutil.copytree(BUNDLED_MODEL, own, ignore=shutil.ignore_patterns("*.safetensors"))
    assert found("h100/llama-3.1-8b", str(own)) == (own, "own")
    with pytest.raises(ConfigError, match="did you mean h100/llama"):
        found("h100/llama")
