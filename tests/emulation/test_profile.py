"""Profiles: their formula against plain arithmetic, the shape of a step's cost, and bad files."""

from pathlib import Path

import pytest

from tandem.emulation.profile import Profile, load_profile
from tandem.engine.schedule.step_cost import StepWork
from tandem.launch.simulation.emulated import figures_of_profile
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.messages import SamplingParams
from tests.emulation.harness import FAST, EmulatedEngine, fast_profile, random_prompts

H100_8B = "h100/llama-3.1-8b"


def decodes(num_decodes: int, context: int) -> StepWork:
    return StepWork(num_decodes=num_decodes, decode_context=num_decodes * context)


def prompt(num_tokens: int, start: int = 0, beside: int = 0) -> StepWork:
    work = decodes(beside, 1000)
    work.add_prompt(start, num_tokens)
    return work


def seconds(profile: Profile, work: StepWork, num_padded: int | None = None) -> float:
    return profile.step_seconds(work, 0, work.num_decodes if num_padded is None else num_padded)


def test_products_hide_behind_the_weights_and_the_weights_behind_products() -> None:
    profile = load_profile(H100_8B)
    alone, beside = seconds(profile, prompt(4080)), seconds(profile, prompt(4080, beside=16))
    of_decodes = seconds(profile, decodes(16, 1000))
    assert of_decodes > profile.weights_s
    assert beside - alone < 0.35 * of_decodes  # their attention alone
    assert seconds(profile, prompt(128)) == pytest.approx(seconds(profile, prompt(16)), rel=0.01)


def test_a_graph_s_padding_and_a_tile_s_rest_cost_as_if_they_were_tokens() -> None:
    profile = load_profile(H100_8B)
    large = seconds(profile, decodes(300, 10), 512)
    assert large == pytest.approx(seconds(profile, decodes(512, 10), 512), rel=0.02)
    assert seconds(profile, prompt(1025)) == pytest.approx(seconds(profile, prompt(1152)), rel=0.01)
    assert seconds(profile, prompt(1024)) < 0.95 * seconds(profile, prompt(1025))


def test_attention_grows_with_contexts_beside_both() -> None:
    profile = load_profile(H100_8B)
    longer = seconds(profile, decodes(8, 10_000)) - seconds(profile, decodes(8, 1000))
    assert longer == pytest.approx(8 * 9000 * profile.context_s)
    later = seconds(profile, prompt(1024, start=50_000)) - seconds(profile, prompt(1024))
    assert later == pytest.approx(1024 * 50_000 * profile.position_s)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (FAST.replace("step_s: 1e-6", "step_s: 0"), "step_s"),
        (FAST.replace("kv_tokens: 4096", ""), "kv_tokens"),
        (FAST.replace("row_s: 0", "row_s: .nan"), "row_s"),
        (FAST + "steps: 1\n", "steps"),
        ("[", "cannot be read"),
        ("- 1", "Profile"),
        ("#" * 70_000, "longer than 65536 bytes"),
    ],
)
def test_a_bad_profile_is_an_error_that_names_file_and_key(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as error:
        load_profile(str(path))
    assert str(path) in error.value.message


def test_an_unknown_profile_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean h100/llama-3\.1-8b"):
        load_profile("h100/llama-3.1-8")


def test_an_emulated_cpu_has_the_engine_s_defaults_of_one(tmp_path: Path) -> None:
    slow, fast = (
        EmulatedEngine(fast_profile(tmp_path, device_kind=kind), {"block_size": None})
        for kind in ("cpu", "gpu")
    )
    assert (slow.engine.overlap, fast.engine.overlap) == (False, True)
    assert (slow.engine.block_pool.block_size, fast.engine.block_pool.block_size) == (16, 64)
    figures = figures_of_profile(slow.runner.profile)
    assert (figures.block_size, figures.overlap, figures.costs.tile_tokens) == (16, False, 1)
    for index, prompt in enumerate(random_prompts(4, seed=5, longest=200)):
        slow.add(str(index), prompt, 20, SamplingParams(temperature=0))
    slow.run()
    assert slow.wrong() == []
