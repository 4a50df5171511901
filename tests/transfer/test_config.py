import pytest
from pydantic import ValidationError

from tandem.transfer.config import TransferConfig


@pytest.mark.parametrize(
    ("write_timeout_s", "lease_margin_ms", "grace_ms", "is_safe"),
    [(2.0, 50, 2450, True), (2.0, 50, 2449, False), (0.1, 0, 500, False), (0.1, 0, 600, True)],
)
def test_no_quarantine_is_shorter_than_a_write_may_take(
    write_timeout_s: float, lease_margin_ms: int, grace_ms: int, is_safe: bool
) -> None:
    def configure() -> None:
        TransferConfig(
            write_timeout_s=write_timeout_s, lease_margin_ms=lease_margin_ms, grace_ms=grace_ms
        )

    if is_safe:
        configure()
        return
    with pytest.raises(ValidationError, match=r"raise lease_margin_ms .* or grace_ms"):
        configure()
