"""The error of an exchange to which a rank does not come."""


class MissingRankError(Exception):
    """A rank did not arrive; the others can't go on."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} did not arrive")
        self.rank = rank
