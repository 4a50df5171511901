"""The comparison of emulated, real and simulated clusters: its requests and its tables."""

from pathlib import Path

import msgspec
import pytest

from tandem.runtime.errors import ConfigError
from tools.emulation.agreement import Agreement, Figures, Options, chosen_layout, markdown


def figures(**changes: float) -> Figures:
    same = dict.fromkeys(Figures.__struct_fields__, 10.0)
    return msgspec.convert(same | changes, Figures)


def test_what_is_simulated_has_the_requests_of_the_trace(tmp_path: Path) -> None:
    options = Options(load="short in, long out", seconds=4.0, workers=2, rate=(20.0,))
    agreement = Agreement(options, 20.0, tmp_path)
    found = agreement.simulated(0)
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert 0.6 * len(lines) < found.num_requests < len(lines)  # the first seconds do not count
    assert found == agreement.simulated(0)
    assert found.share_kept == 1.0 and 0 < found.ttft_p50 < found.ttft_p99


def test_differences_beyond_a_tenth_are_marked_by_medians() -> None:
    ways = {
        "real": [figures(itl_p50=8.0), figures(itl_p50=10.0), figures(itl_p50=90.0)],
        "simulated": [figures(ttft_p50=10.9, itl_p50=11.2)],
    }
    *_, last = lines = markdown(ways).splitlines()
    assert any("its range" in line and "8 to 90" in line for line in lines)
    assert "+9%" in last and "**+9%**" not in last
    assert "**+12%**" in last


def test_a_layout_that_does_not_exist_is_an_error() -> None:
    assert chosen_layout(Options(workers=2, layout="1P 1D")).name == "1P 1D"
    with pytest.raises(ConfigError, match="3P 1D"):
        chosen_layout(Options(workers=2, layout="3P 1D"))
