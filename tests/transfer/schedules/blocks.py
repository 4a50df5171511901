"""The blocks of a schedule's decode worker, in its real pool; checks I1, I2, I5 and I6.

The checks rest on what the world knows and the machines don't: which writes can still land, and
what every block should hold.
"""

from tandem.engine.schedule.block_pool import BlockPool
from tandem.runtime.wire.handoff_messages import FirstToken
from tests.transfer.schedules.memory import Shape, Words
from tests.transfer.schedules.parts import Case, Decoding, Write

NUM_BLOCKS = 14
TOKEN = 7  # the one that every prompt is followed by


class BlocksSide:
    """Who may write which block, and who reads it. `writes` are those that may be under way."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.now = 100.0
        self.pool = BlockPool(NUM_BLOCKS, 1)
        self.words = Words(shape, shape.decode_tp, NUM_BLOCKS)
        self.writable: dict[int, Case] = {}  # block |-> the handoff that may write it
        self.cases: list[Case] = []
        self.num_open = 0  # of `cases`, those whose blocks are not free yet
        self.decoding: list[Decoding] = []
        self.writes: list[Write] = []

    def must_be_quiet(self, case: Case) -> None:
        for write in self.writes:
            assert write.job.case is not case or write.fate != "posted", (
                f"I1: blocks of handoff {case.number} are free, and a write can still land in them"
            )

    def admit(self, case: Case, first: FirstToken) -> None:
        assert case.place == "fill" and first.token_id == TOKEN and case.num_emitted == 1
        self.must_be_quiet(case)
        for ordinal, block_id in case.machine.grant.fill:
            assert self.words.holds(block_id, case.prompt, ordinal, case.runs), (
                f"I2: handoff {case.number} is admitted, and block {block_id} does not hold "
                f"ordinal {ordinal}"
            )
            del self.writable[block_id]
        case.place = "decoding"
        self.num_open -= 1
        self.decoding.append(Decoding(case.prompt, case.blocks))

    def give_back(self, case: Case, quarantined: bool) -> None:
        assert case.place == "fill", "a handoff ended twice"
        if quarantined:
            self.pool.quarantine(case.fill)
            case.place = "quarantine"
            self.pool.free(case.blocks[: case.num_cached])
        else:
            self.must_be_quiet(case)
            self.pool.free(case.blocks)
            self.leave(case)
        self.check_pool()

    def leave(self, case: Case) -> None:
        case.place = "gone"
        self.num_open -= 1
        for block_id in case.fill:
            del self.writable[block_id]
        self.check_pool()

    def prefill_locally(self, case: Case) -> None:
        """Compute the prompt here if there is room, in blocks that may just have become free."""
        num_blocks = len(case.blocks)
        hashes = [bytes((case.prompt, ordinal)) for ordinal in range(num_blocks - 1)]
        blocks = self.pool.match_prefix(hashes)
        num_cached = len(blocks)
        fresh = self.pool.allocate(num_blocks - num_cached)
        if fresh is None:
            self.pool.free(blocks)
            return
        for ordinal, block_id in enumerate(fresh, start=num_cached):
            assert block_id not in self.writable, "I1: computes in a block that may be written"
            self.words.compute(block_id, range(self.shape.num_layers), case.prompt, ordinal, 0)
        self.decoding.append(Decoding(case.prompt, blocks + fresh))

    def finish(self, decoding: Decoding) -> None:
        """Its last decode step; the prompt's blocks stay in the prefix cache."""
        self.must_be_right(decoding)
        self.decoding.remove(decoding)
        for ordinal, block_id in enumerate(decoding.blocks[:-1]):
            if self.pool._hash_of[block_id] is None:
                self.pool.publish([block_id], [bytes((decoding.prompt, ordinal))])
        self.pool.free(decoding.blocks)
        self.check_pool()

    def must_be_right(self, decoding: Decoding) -> None:
        for ordinal, block_id in enumerate(decoding.blocks):
            assert block_id not in self.writable, "I1: a block that is read may be written"
            assert self.words.is_of(block_id, decoding.prompt, ordinal), (
                f"I2: block {block_id} is read, and does not hold ordinal {ordinal}"
            )

    def check_pool(self) -> None:
        """I6, counted from who holds what."""
        holders: dict[int, int] = {}
        num_quarantined = 0
        for case in self.cases:
            if case.place == "fill":
                for block_id in case.blocks:
                    holders[block_id] = holders.get(block_id, 0) + 1
            elif case.place == "quarantine":
                num_quarantined += len(case.blocks) - case.num_cached
        for decoding in self.decoding:
            for block_id in decoding.blocks:
                holders[block_id] = holders.get(block_id, 0) + 1
        self.pool.check_invariants(holders)
        assert self.pool.num_quarantined == num_quarantined, "I6: blocks were lost"
