"""A folder in which anything was changed is served as transformers computes it, or refused."""

import contextlib
import json
import resource
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.frontend.tokens.tokenizer import ModelText
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import InvalidRequestError, TandemError
from tandem.runtime.membership.model_files import read_model_files, weights_fingerprint
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.engine.tiny_models import make_model
from tests.engine.transformers_models.generic_architectures import EXPERTS
from tests.engine.transformers_models.test_generic import save
from tests.engine.weights.quantizers import FORMS, quantize_model
from tests.models.mutants import mutate

PROMPT = [3, 77, 250, 12, 12, 199, 8]
NUM_TOKENS = 4
TEXT = " Two  words\n\n<|im_end|>x<|endoftext|> wörld 😀 123"
CHAT = [{"role": "system", "content": " s "}, {"role": "user", "content": TEXT}]


def serve(folder: Path) -> list[int]:
    """Do what a worker and a frontend do; return a greedy answer. Raise TandemError."""
    text = ModelText(read_model_files(folder).files)
    with contextlib.suppress(InvalidRequestError):  # of each chat: completions go on
        text.render([{"role": "user", "content": "Hi"}], {}, 10_000, 1.0)
    choose_model_config(folder, "auto")
    weights_fingerprint(folder)
    config = EngineConfig(model=str(folder), device="cpu", threads=1, num_blocks=16, block_size=8)
    engine = Engine(config, ModelRunner(config))
    stop = StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True)
    params = SamplingParams(temperature=0.0)
    engine.add(Sequence("r", list(PROMPT), len(PROMPT), params, stop))
    answer: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            answer += output.token_ids
    return answer


def expected(folder: Path, answer: list[int], numbers: Path) -> torch.Tensor | None:
    """Return the logits of each token of an answer by transformers; None where it cannot load.

    `numbers` is a folder of the numbers that codes stand for, which no other software is here for.
    """
    given = torch.tensor([[*PROMPT, *answer[:-1]]])
    try:
        config = json.loads((folder / "config.json").read_text())
        if config.pop("quantization_config", None) is not None:
            (numbers / "config.json").write_text(json.dumps(config))
            folder = numbers
        with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
            logits: torch.Tensor = model.eval()(given).logits[0, -len(answer) :]
            return logits
    except Exception:  # of whatever the folder says
        return None


def check_text(folder: Path, what: str) -> None:
    """Hold the tokens and the chat of a folder against those of transformers, if it has some."""
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
        tokens = theirs(TEXT)["input_ids"]
        chat = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    except Exception:  # of whatever the folder says
        return
    text = ModelText(read_model_files(folder).files)
    with contextlib.suppress(InvalidRequestError):
        found = text.encode(TEXT, is_chat=False, param="prompt")
        assert found == tokens, f"{what}: {found}, not {tokens}"
    with contextlib.suppress(InvalidRequestError):
        rendered = text.render(CHAT, {}, 10_000, 1.0)
        assert rendered == chat, f"{what}: {rendered!r}, not {chat!r}"


def write_sources(folder: Path) -> list[Path]:
    """Write models of this engine's code, of transformers' code, and one stored as codes."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = write_random_model(folder / "llama", architecture="llama", tie_word_embeddings=False)
    others = [folder / "stablelm", folder / "phimoe", folder / "mistral", folder / "gptq"]
    save(others[0], "stablelm", {"vocab_size": 512})
    save(others[1], "phimoe", EXPERTS | {"vocab_size": 512, "sliding_window": 256})
    make_model(others[2], "mistral", sliding_window=4)
    make_model(folder / "numbers", "qwen2")
    quantize_model(folder / "numbers", others[3], *FORMS["gptq"])
    for each in others:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(plain / name, each / name)
    sharded = write_random_model(folder / "qwen3", rope_scaling=yarn, max_shard_bytes=200_000)
    return [plain, sharded, *others]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_sources(tmp_path_factory.mktemp("sources"))


def check(sources: list[Path], folder: Path, seeds: range) -> tuple[int, int]:
    """Serve a mutant of each seed. Return how many were served and how many refused."""
    num_served = num_refused = 0
    for seed in seeds:
        what = mutate(sources[seed % len(sources)], folder, seed)
        begun = time.process_time()
        try:
            answer = serve(folder)
        except TandemError as error:
            assert error.message, what
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {what}: {error!r}") from error
        else:
            num_served += 1
            if what.startswith(("tokenizer", "chat_template")):
                check_text(folder, f"seed {seed}: {what}")
            logits = expected(folder, answer, sources[0].parent / "numbers")
            if logits is not None and bool(logits.isfinite().all()):
                behind = float((logits.amax(1) - logits[range(len(answer)), answer]).max())
                assert behind < 1e-3, f"seed {seed}: {what}: a token is {behind} from the best"
        assert time.process_time() - begun < 10, f"seed {seed}: {what}"
        shutil.rmtree(folder)
    return num_served, num_refused


@pytest.mark.filterwarnings("ignore")  # of transformers, of odd values
def test_mutants_are_served_right_or_refused(sources: list[Path], tmp_path: Path) -> None:
    num_served, num_refused = check(sources, tmp_path / "mutant", range(48))
    assert num_served > 5 and num_refused > 15


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_hundreds_of_mutants_are_served_right_or_refused_in_bounded_memory(
    sources: list[Path], tmp_path: Path
) -> None:
    check(sources, tmp_path / "mutant", range(48))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_served, num_refused = check(sources, tmp_path / "mutant", range(48, 648))
    assert num_served > 60 and num_refused > 180
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB
