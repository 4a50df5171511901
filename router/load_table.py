"""The loads of all instances, one column each, so that a prompt is predicted at many at once."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tandem.router.load import InstanceLoad
from tandem.router.predict import Floats, Pace, bounded, bounding_factors, scaled

Rows = NDArray[np.intp]
_NUM_PACE = 8  # of the columns: the fields of a Pace, in their order
_PROMPT_S, _DECODE_S, _NUM_REQUESTS, _PENDING, _ACTIVE = range(_NUM_PACE, _NUM_PACE + 5)
_NO_COSTS = (np.nan,) * (_NUM_PACE + 2)
_FIRST_CAPACITY = 16


class LoadTable:
    """The loads by instance id. The owner calls `changed` after each change of one.

    A column is computed when it is read after changes, and its place is used again after `remove`.
    """

    def __init__(self) -> None:
        self._loads: dict[str, InstanceLoad] = {}
        self._columns = np.zeros((_ACTIVE + 1, _FIRST_CAPACITY))
        self._free = list(range(_FIRST_CAPACITY))
        self._changed: dict[str, None] = {}
        self._candidates: list[str] = []  # of the last call of `rows`
        self._rows: Rows = np.zeros(0, np.intp)  # of these

    def get(self, instance_id: str) -> InstanceLoad | None:
        """Return the load of an instance, None for one that is not in the table."""
        return self._loads.get(instance_id)

    def add(self, instance_id: str) -> InstanceLoad:
        """Return the load of an instance, which is empty at first."""
        load = self._loads.get(instance_id)
        if load is None:
            if not self._free:
                capacity = self._columns.shape[1]
                self._columns = np.hstack([self._columns, np.zeros_like(self._columns)])
                self._free.extend(range(capacity, 2 * capacity))
            load = self._loads[instance_id] = InstanceLoad(self._free.pop())
            self.changed(instance_id)
        return load

    def changed(self, instance_id: str) -> None:
        """Note that the load of an instance is another one now."""
        self._loads[instance_id].last_pace = None
        self._changed[instance_id] = None

    def remove(self, instance_id: str) -> None:
        """Remove an instance."""
        load = self._loads.pop(instance_id, None)
        if load is not None:
            self._free.append(load.row)
            self._changed.pop(instance_id, None)
            self._candidates = []

    def rows(self, instance_ids: list[str]) -> Rows:
        """Return the places of these instances in the table, which is up to date for them."""
        if instance_ids != self._candidates:
            self._rows = np.array([self.add(each).row for each in instance_ids], np.intp)
            self._candidates = list(instance_ids)
        self._update()
        return self._rows

    def paces(self, rows: Rows) -> Pace[Floats] | None:
        """Return the bounded paces of these instances, None if no costs are known of any.

        An instance without costs borrows those of the median instance until it has its own.
        """
        columns = self._columns[: _DECODE_S + 1].take(rows, axis=1)
        is_unknown = np.isnan(columns[_PROMPT_S])
        if is_unknown.any():
            if is_unknown.all():
                return None
            _lend([self._loads[each] for each in self._candidates])
            for index in np.flatnonzero(is_unknown):
                self.changed(self._candidates[index])
            self._update()
            columns = self._columns[: _DECODE_S + 1].take(rows, axis=1)
        return bounded(Pace(*columns[:_NUM_PACE]), columns[_PROMPT_S], columns[_DECODE_S])

    def blocks(self, rows: Rows) -> tuple[Floats, Floats]:
        """Return the blocks that wait to be prefilled, and those of running requests."""
        return self._columns[_PENDING].take(rows), self._columns[_ACTIVE].take(rows)

    def num_requests(self, rows: Rows) -> Floats:
        """Return the numbers of our own requests in flight."""
        taken: Floats = self._columns[_NUM_REQUESTS].take(rows)
        return taken

    def _update(self) -> None:
        for instance_id in self._changed:
            load = self._loads[instance_id]
            self._columns[:, load.row] = (
                *_paces_of(load),
                load.num_requests,
                load.pending(),
                load.active(),
            )
        self._changed.clear()


def few_paces(loads: list[InstanceLoad]) -> list[Pace[float]] | None:
    """Return what `LoadTable.paces` does, in numbers: faster where the instances are few."""
    paces = [pace for load in loads if (pace := load.pace()) is not None]
    if len(paces) < len(loads):
        if not paces:
            return None
        _lend(loads)
        return few_paces(loads)
    if len(loads) == 1:
        return paces
    by_prompts = bounding_factors([load.nominal_s[0] for load in loads])
    by_decodes = bounding_factors([load.nominal_s[1] for load in loads])
    if by_prompts is None and by_decodes is None:
        return paces
    ones = [1.0] * len(loads)
    return list(map(scaled, paces, by_prompts or ones, by_decodes or ones))


def _lend(loads: list[InstanceLoad]) -> None:
    """Give the costs of the median instance to those without."""
    known = [load for load in loads if load.costs is not None]
    known.sort(key=lambda load: load.nominal_s[0])
    costs = known[(len(known) - 1) // 2].costs
    assert costs is not None
    for load in loads:
        if load.costs is None:
            load.set_costs(costs)


def _paces_of(load: InstanceLoad) -> Iterable[float]:
    """Return the columns that depend on costs."""
    pace = load.pace()
    if pace is None:
        return _NO_COSTS
    return (
        pace.per_step_s,
        pace.per_token_s,
        pace.per_position_s,
        pace.decode_s,
        pace.num_step_tokens,
        pace.waiting_tokens_s,
        pace.num_waiting_steps,
        pace.num_decodes,
        *load.nominal_s,
    )
