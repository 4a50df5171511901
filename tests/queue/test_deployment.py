"""The id that two workers share: every part of it keeps K/V apart that is not the same."""

from tandem.queue.deployment import deployment_id


def test_every_part_tells_deployments_apart() -> None:
    parts = ["namespace", "model", "weights", "form", "layout", "transport"]
    others = [[*parts[:index], "other", *parts[index + 1 :]] for index in range(len(parts))]
    ids = {deployment_id(*each) for each in (parts, *others)}
    assert len(ids) == 1 + len(parts)
    assert deployment_id(*parts) in ids
