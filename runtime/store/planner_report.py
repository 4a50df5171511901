"""The record of a planner in discovery, for `tandem status` and the page.

/tandem/{namespace}/planner/{instance_id}    PlannerReport, under the planner's lease
"""

from typing import Literal

import msgspec

from tandem.runtime.store.discovery import Discovery, TypedView
from tandem.runtime.wire.bounds import Count, Few, Message, Name, Text
from tandem.runtime.wire.decoding import json_decoder


class PlannedModel(Message, frozen=True, tag=False):
    """The last reading of one deployment of a model, and its last change."""

    model: Name
    deployment: Name
    num_prefill: Count
    num_generating: Count
    sentence: Text
    num_changes: Count = 0
    last_change: Text = ""


class PlannerReport(Message, frozen=True, tag=False):
    """One planner; of several the one whose id comes first acts, and the others advise."""

    instance_id: Name
    mode: Literal["advise", "act"]
    models: Few[PlannedModel] = msgspec.field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Lines for an operator."""
        found = []
        for each in self.models:
            found.append(f"planner ({self.mode}), {each.model}: {each.sentence}")
            if each.last_change:
                found.append(f"  last of {each.num_changes} changes: {each.last_change}")
        return found or [f"planner ({self.mode}): no workers yet"]


decode_report = json_decoder(PlannerReport)


def planner_prefix(namespace: str) -> str:
    """Return the prefix of all planners."""
    return f"/tandem/{namespace}/planner/"


def watch_planners(discovery: Discovery, namespace: str) -> TypedView[PlannerReport]:
    """Follow instance id |-> report."""
    return TypedView(discovery.watch(planner_prefix(namespace)), PlannerReport)
