"""The lists of API keys, and the buckets of their limits."""

from pathlib import Path

import pytest

from tandem.frontend.access import limits
from tandem.frontend.access.keys import ApiKey, parse_keys, read_keys
from tandem.frontend.access.limits import Bucket, Client
from tandem.frontend.errors import RateLimitError
from tandem.runtime.errors import ConfigError

HASH = "ab" * 32


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(limits.time, "perf_counter", lambda: now[0])
    return now


def test_a_list_has_names_hashes_limits_and_scopes() -> None:
    text = f"# keys\nalice {HASH} metrics requests_per_minute=3 operator # 1st\n\nbob {'cd' * 32}"
    assert parse_keys(text, "list") == [
        ApiKey("alice", bytes.fromhex(HASH), 3, None, frozenset({"operator", "metrics"})),
        ApiKey("bob", bytes.fromhex("cd" * 32)),
    ]
    assert parse_keys(f"a {HASH};b {'cd' * 32}", "list")[1].name == "b"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("alice", "SHA-256"),
        ("alice secret", "SHA-256"),
        (f"a/b {HASH}", "the name"),
        (f"alice {HASH} requests_per_minute=0", "requests_per_minute=0"),
        (f"alice {HASH} tokens_per_minute=99999999999", "tokens_per_minute"),
        (f"alice {HASH} admin", "'admin'"),
    ],
)
def test_a_wrong_entry_is_an_error_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_keys("\n" + text, "frontend.api_keys")
    assert caught.value.message.startswith("frontend.api_keys: entry 2: ")
    assert HASH not in caught.value.message


def test_names_and_keys_are_unique_over_both_lists(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"bob {HASH}\n")
    with pytest.raises(ConfigError, match="same"):
        read_keys(f"alice {HASH}", str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys("", str(tmp_path / "none"))
    file.write_bytes(b"#" * 5_000_000)
    with pytest.raises(ConfigError, match="is over"):
        read_keys("", str(file))


def test_requests_beyond_the_limit_wait_for_their_share_of_the_minute(clock: list[float]) -> None:
    client = Client(ApiKey("a", b"", requests_per_minute=3))
    for _ in range(3):
        client.admit()
    with pytest.raises(RateLimitError) as caught:
        client.admit()
    assert caught.value.retry_after_s == pytest.approx(20.0)
    clock[0] += 20.0
    client.admit()
    assert dict(client.headers())[b"x-ratelimit-remaining-requests"] == b"0"
    clock[0] += 600.0
    headers = dict(client.headers())
    assert headers[b"x-ratelimit-remaining-requests"] == b"3"
    assert headers[b"x-ratelimit-reset-requests"] == b"0.000s"


def test_reservations_are_exact_and_what_was_not_used_comes_back(clock: list[float]) -> None:
    client = Client(ApiKey("a", b"", tokens_per_minute=100))
    first = client.charge(8, 52)
    with pytest.raises(RateLimitError):
        client.charge(1, 40)
    second = client.charge(1, 39)
    first.end(2, is_returned=False)
    second.end(0, is_returned=True)
    assert dict(client.headers())[b"x-ratelimit-remaining-tokens"] == b"90"
    client.charge(5, 0).end(180, is_returned=False)  # an answer without a limit of its own
    with pytest.raises(RateLimitError) as caught:
        client.admit()
    assert caught.value.retry_after_s == pytest.approx(57.6)  # 95 of debt and one token
    clock[0] += 57.7
    client.admit()


def test_a_request_larger_than_the_limit_needs_a_full_bucket(clock: list[float]) -> None:
    client = Client(ApiKey("a", b"", tokens_per_minute=100))
    client.charge(1, 0)
    with pytest.raises(RateLimitError):
        client.charge(300, 200)
    clock[0] += 1.0
    client.charge(300, 200)


def test_a_bucket_never_holds_more_than_its_limit(clock: list[float]) -> None:
    bucket = Bucket(10)
    bucket.take(-50)
    clock[0] += 1e6
    assert bucket.level == 10
