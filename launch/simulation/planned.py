"""A simulated cluster whose roles a planner moves."""

from tandem.config.planner import PlannerConfig
from tandem.launch.planner.planner import Change, RolePlanner
from tandem.launch.simulation.cluster import Setup, VirtualCluster
from tandem.launch.simulation.layout import Layout


class PlannedCluster(VirtualCluster):
    """Workers that begin in the roles of a layout; `moves` has each change and its second."""

    def __init__(self, layout: Layout, setup: Setup, config: PlannerConfig) -> None:
        super().__init__(layout, setup)
        self.planner = RolePlanner(config, setup.figures.block_size)
        self.moves: list[tuple[float, Change]] = []
        self._decides_at_s = config.interval_s

    def _report(self) -> None:
        super()._report()
        now_s = self._clock.now_s
        for worker in self.workers:
            self.planner.reported(worker.report(), now_s)
        if now_s < self._decides_at_s:
            return
        self._decides_at_s = now_s + self.planner.config.interval_s
        change = self.planner.decide(self._handoffs.num_ticket_tokens, now_s).change
        if change is not None:
            self.moves.append((now_s, change))
            worker = next(each for each in self.workers if each.name == change.instance_id)
            self.change_role(worker, change.role)
