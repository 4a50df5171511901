"""The profiles in the tree: as the formula gives them, and the formula against plain arithmetic."""

import pytest

from tandem.emulation.profile import load_profile, profile_names
from tools.emulation.profiles import rendered

H100_8B = "h100/llama-3.1-8b"


def test_the_files_are_as_the_formula_gives_them() -> None:
    texts = rendered()
    assert len(texts) == len(profile_names()) == 6
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, "run python -m tools.emulation.profiles"


def test_the_shipped_profiles_are_of_their_published_figures() -> None:
    profiles = {name: load_profile(name) for name in profile_names()}
    one = profiles[H100_8B]
    # 7.5 billion weights without the embedding; 3.35 TB/s at 80 %; 989 TFLOP/s at 66 %
    assert one.weights_s == pytest.approx(2 * 7.505e9 / (3.35e12 * 0.8), rel=0.001)
    assert one.token_s == pytest.approx(2 * 6.979e9 / (989e12 * 0.66), rel=0.001)
    assert one.kv_bytes_per_token == 128 * 1024
    assert one.context_s == pytest.approx(131_072 / (3.35e12 * 0.8), rel=0.001)
    assert 4e5 < one.kv_tokens < 4.4e5
    four = profiles["h100/llama-3.1-70b"]
    assert four.kv_bytes_per_token == 320 * 1024
    assert four.weights_s == pytest.approx(2 * 69.5e9 / (4 * 3.35e12 * 0.8), rel=0.01)
    assert four.step_s > one.step_s  # sums over ranks
    for name in profile_names():
        newer = profiles[name.replace("h100", "h200")]
        assert newer.weights_s <= profiles[name].weights_s
        assert newer.kv_tokens >= profiles[name].kv_tokens
