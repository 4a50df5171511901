"""Where the time to the first and to the second token went, as the decode workers tell it."""

from collections.abc import Mapping

from rich.table import Table

from tandem.bench.load.metrics import Distribution

Breakdown = Mapping[str, Mapping[str, Distribution]]  # course |-> part |-> ms

TITLES: Mapping[str, str] = {"remote": "prefilled remotely", "local": "prefilled locally"}
ROWS: Mapping[str, Mapping[str, str]] = {
    "remote": {
        "ttft": "time to first token",
        "outside": "  outside the decode worker",
        "placement": "  placed, and put on the queue",
        "queue": "  waited for a prefill worker",
        "prefix_pull": "  prefix pulled",
        "compute": "  computed",
        "answer": "  first token brought back",
        "ttst": "time to second token: as above until computed, then",
        "exposed_transfer": "  exposed transfer",
        "verification": "  verification",
        "first_step": "  first step",
    },
    "local": {
        "ttft": "time to first token",
        "outside": "  outside the decode worker",
        "prefill": "  waited and computed",
        "ttst": "time to second token: as above, then",
        "second_token": "  first step",
    },
}


def breakdown_tables(sides: Mapping[str, Breakdown]) -> list[Table]:
    """A table for each course that any side has; the sides, by name, stand beside each other."""
    return [
        _table(course, {name: side.get(course, {}) for name, side in sides.items()})
        for course in ROWS
        if any(course in side for side in sides.values())
    ]


def _table(course: str, sides: Mapping[str, Mapping[str, Distribution]]) -> Table:
    num_requests = ", ".join(
        f"{name} {max(spread.num_samples for spread in side.values()) if side else 0}".strip()
        for name, side in sides.items()
    )
    marks = [f"{name} {mark}".strip() for name in sides for mark in ("p50", "p99")]
    table = Table("ms", *marks, title=f"{TITLES[course]} ({num_requests} requests)")
    for column in table.columns[1:]:
        column.justify = "right"
    for part, label in ROWS[course].items():
        spreads = [side.get(part) for side in sides.values()]
        if any(spreads):
            table.add_row(label, *(cell for spread in spreads for cell in _cells(spread)))
    return table


def _cells(spread: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (short(spread.p50), short(spread.p99))


def short(value: float) -> str:
    """A figure in four digits or so."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"
