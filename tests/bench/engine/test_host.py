import pytest

from tandem.bench.engine.host import measure


@pytest.mark.parametrize("overlap", [False, True])
def test_every_step_is_timed_and_decodes_every_sequence(overlap: bool) -> None:
    found = measure(5, 70, overlap=overlap)
    assert len(found) == 70 and min(found) > 0
