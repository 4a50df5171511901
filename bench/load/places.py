"""The places where the prompts of a run were computed, and the commonest reasons. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from tandem.bench.client.record import RequestRecord

NUM_REASONS = 3  # that are shown
_NUMBER = re.compile(r"\d+(\.\d+)?")


def places_of(records: Iterable[RequestRecord]) -> Counter[str]:
    """Return the number of prompts at each place, for servers that send it."""
    return Counter(record.prefill_place for record in records if record.prefill_place)


def reasons_of(records: Iterable[RequestRecord]) -> Counter[str]:
    """Return the number of prompts by place and reason; N stands for each number in a reason."""
    return Counter(
        _NUMBER.sub("N", f"{record.prefill_place}: {record.prefill_reason}")
        for record in records
        if record.prefill_reason
    )


def commonest(reasons: Counter[str]) -> dict[str, int]:
    """Return the NUM_REASONS commonest reasons."""
    return dict(reasons.most_common(NUM_REASONS))


def share_remote(places: Mapping[str, int]) -> float:
    """Return the share of the prompts that were computed remotely."""
    return places.get("remote", 0) / max(sum(places.values()), 1)


def in_words(places: Mapping[str, int]) -> str:
    """Return the number of prompts at each place, and the share of the remote ones."""
    counts = ", ".join(f"{count} {place}" for place, count in places.items())
    return f"{counts} ({share_remote(places):.0%} remote)"


def reason_lines(reasons: Mapping[str, int]) -> list[str]:
    """Return a line for each reason."""
    return [f"  {count:5d} x {why}" for why, count in reasons.items()]
