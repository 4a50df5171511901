"""The loads of all instances, one column each, so that a prompt is predicted at many at once."""

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from tandem.router.load import InstanceLoad, Shared
from tandem.router.predict import Floats, Pace, bounding_arrays, scaled

_NUM_PACE = 11  # of the columns: the fields of a Pace, in their order
_PROMPT_S, _DECODE_S, _TTFT_TARGET, _NUM_REQUESTS, _PENDING, _ACTIVE, _FILLABLE = range(
    _NUM_PACE, _NUM_PACE + 7
)
_IN_TIME = _FILLABLE + 1
_IS_SHARED, _NUM_ANSWERS = range(_IN_TIME + 1, _IN_TIME + 3)  # of those that take tickets too
_NO_COSTS = (np.nan,) * (_NUM_PACE + 2)
_FIRST_CAPACITY = 16
Flags = NDArray[np.bool_]


class LoadTable:
    """The loads by instance id. The owner calls `changed` after each change of one.

    A row is computed when it is read after changes, and used again after `remove`. The rows of
    the candidates come first, in their order, so that all of them are read without a copy.
    """

    def __init__(self) -> None:
        self._loads: dict[str, InstanceLoad] = {}
        self._columns = np.zeros((_NUM_ANSWERS + 1, _FIRST_CAPACITY))
        self._free = list(range(_FIRST_CAPACITY))
        self._changed: dict[str, None] = {}
        self._candidates: list[str] = []  # of the last call of `arrange`
        self._first: Floats = self._columns[:, :0]  # the part of the columns with these
        self._pace: Pace[Floats] = Pace(*self._first[:_NUM_PACE])  # views of these
        self._have_costs_changed = True  # of any instance, since the factors were computed
        self._factors: tuple[Floats, Floats] | None = None
        self._have_targets = False
        self._shared = Shared()  # of the candidates together

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
                self._candidates = []
            load = self._loads[instance_id] = InstanceLoad(self._free.pop())
            self.changed(instance_id)
        return load

    def changed(self, instance_id: str) -> None:
        """Note that the load of an instance is another one now."""
        self._changed[instance_id] = None

    def remove(self, instance_id: str) -> None:
        """Remove an instance."""
        load = self._loads.pop(instance_id, None)
        if load is not None:
            self._free.append(load.row)
            self._changed.pop(instance_id, None)
            self._candidates = []

    def arrange(self, instance_ids: list[str]) -> None:
        """Make different instances the candidates, whose rows are up to date then."""
        if instance_ids != self._candidates:
            for each in instance_ids:
                self.add(each)
            chosen = {each: self._loads[each] for each in instance_ids}
            loads = list((chosen | self._loads).values())
            self._columns[:, : len(loads)] = self._columns[:, [load.row for load in loads]]
            for row, load in enumerate(loads):
                load.row = row
            self._free = list(range(len(loads), self._columns.shape[1]))
            self._first = self._columns[:, : len(instance_ids)]
            self._pace = Pace(*self._first[:_NUM_PACE])
            self._candidates, self._have_costs_changed = list(instance_ids), True
            self._shared = Shared()
            for load in chosen.values():
                self._shared.replace(Shared(), load.shared)
        self._update()

    def paces(self) -> Pace[Floats] | None:
        """Return the bounded paces of the candidates, None if no costs are known of any.

        An instance without costs borrows those of the median instance until it has its own.
        """
        first = self._first
        if self._have_costs_changed:
            is_unknown = np.isnan(first[_PROMPT_S])
            if is_unknown.all():
                return None
            if is_unknown.any():
                _lend([self._loads[each] for each in self._candidates])
                for index in np.flatnonzero(is_unknown):
                    self.changed(self._candidates[index])
                self._update()
            self._factors = bounding_arrays(first[_PROMPT_S], first[_DECODE_S])
            self._have_targets = bool(np.isfinite(first[_TTFT_TARGET]).any())
            self._have_costs_changed = False
        return self._pace if self._factors is None else scaled(self._pace, *self._factors)

    def blocks(self) -> tuple[Floats, Floats]:
        """Return the blocks that wait to be prefilled, and those of running requests."""
        return self._first[_PENDING], self._first[_ACTIVE]

    def num_requests(self) -> Floats:
        """Return the numbers of our own requests in flight at the candidates."""
        num_requests: Floats = self._first[_NUM_REQUESTS]
        return num_requests

    def fit(self, num_blocks: int) -> Flags:
        """Return which candidates have a batch row and `num_blocks` blocks left.

        Of these the ones whose answers' steps stay in time with so many more, where one does.
        """
        have_room: Flags = self._first[_FILLABLE] >= num_blocks
        in_time: Flags = have_room & (self._first[_IN_TIME] >= num_blocks)
        return in_time if in_time.any() else have_room

    def ttft_targets(self) -> Floats | None:
        """Return the seconds in which a first token should come at each candidate, or infinity.

        None where no candidate has such a target.
        """
        return self._first[_TTFT_TARGET] if self._have_targets else None

    def sharing(self) -> tuple[Floats, Floats, Shared] | None:
        """Return which candidates take tickets too, 1 or 0, all answers of each, and the sum.

        The sum is of running answers: those that wait are no reason for more workers to hold some,
        which would leave fewer for the prompts that they wait for.

        None where no candidate does.
        """
        if not self._shared.num_workers:
            return None
        return self._first[_IS_SHARED], self._first[_NUM_ANSWERS], self._shared

    def _update(self) -> None:
        if not self._changed:
            return
        rows: list[int] = []
        values: list[tuple[float, ...]] = []
        for instance_id in self._changed:
            load = self._loads[instance_id]
            self._have_costs_changed |= load.has_new_costs
            load.has_new_costs = False
            before, load.shared = load.shared, load.sharing()
            if load.row < len(self._candidates):
                self._shared.replace(before, load.shared)
            rows.append(load.row)
            values.append(_columns_of(load))
        # At once, as numpy takes long for each call; it takes longer yet to find a type itself.
        self._columns[:, rows] = np.array(values, np.float64).T
        self._changed.clear()


def _lend(loads: list[InstanceLoad]) -> None:
    """Give the costs of the median instance to those without."""
    known = [load for load in loads if load.costs is not None]
    known.sort(key=lambda load: load.nominal_s[0])
    costs = known[(len(known) - 1) // 2].costs
    assert costs is not None
    for load in loads:
        if load.costs is None:
            load.set_costs(costs)


def _columns_of(load: InstanceLoad) -> tuple[float, ...]:
    """Return the values of an instance, in the order of the columns."""
    pace = load.pace()
    return (
        *(_NO_COSTS if pace is None else (*astuple(pace), *load.nominal_s)),
        load.ttft_target_s,
        load.num_requests,
        load.pending(),
        load.active(),
        load.num_fillable(),
        load.num_in_time(),
        load.shared.num_workers,
        load.num_answers,
    )
