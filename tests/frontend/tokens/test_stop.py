from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.tokens.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        out += text
        if is_stopped:
            return out, True
    return out + matcher.flush(), False


def test_text_that_only_began_like_a_stop_string_comes_out() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == ("one ", False)
    assert matcher.push("C") == ("ENC", False)


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=8),
)
def test_pieces_stop_where_the_whole_text_would(stops: list[str], pieces: list[str]) -> None:
    """Where a stop string is complete first, and there at its earliest beginning."""
    text = "".join(pieces)
    out, is_stopped = run(stops, pieces)
    assert is_stopped == any(stop in text for stop in stops)
    if not is_stopped:
        assert out == text
    else:
        assert text.startswith(out) and not any(stop in out for stop in stops)
        assert any(text.startswith(stop, len(out)) for stop in stops)
