"""The parts of a dashboard: panels, their limits and alerts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alert:
    """The alert of a panel: its first query beyond its limit, for `after`."""

    name: str
    after: str
    severity: str = "warning"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph. It is red above `limit`, or below it; without a limit it is there to compare."""

    title: str
    queries: tuple[str, ...]
    unit: str  # in Grafana's words
    remedy: str  # when it is red
    limit: float | None = None
    is_floor: bool = False
    alert: Alert | None = None

    @property
    def description(self) -> str:
        """The text behind the panel's information mark."""
        if self.limit is None:
            return self.remedy
        side = "below" if self.is_floor else "above"
        return f"Red {side} {self.limit:g}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of panels; `name` is that of its file."""

    name: str
    title: str
    panels: tuple[Panel, ...]
