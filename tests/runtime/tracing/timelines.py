"""Timelines of requests that came some time ago."""

from collections.abc import Mapping

from tandem.runtime.tracing.timeline import Stage, Timeline


def aged(stages_ms: Mapping[Stage, float] | None = None, seconds: float = 1.0) -> Timeline:
    """A timeline as of a request that came so long ago and reached these stages."""
    timeline = Timeline()
    timeline.started_at -= seconds
    for stage, ms in (stages_ms or {}).items():
        timeline.mark(stage, timeline.started_at + ms / 1e3)
    return timeline
