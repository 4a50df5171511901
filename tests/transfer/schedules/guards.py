"""The guards of the handoff's state machines.

A guard is a condition without which a wrong answer, a lost block or an endless wait gets possible.
It is named by its text in the source, so a change that moves or drops one is noticed here.
"""

from tests.transfer.schedules.builds import Cut, Guard


def _decode(name: str, old: str, new: str, *more: Cut) -> Guard:
    return Guard(name, (Cut("decode", old, new), *more))


def _prefill(name: str, old: str, new: str) -> Guard:
    return Guard(name, (Cut("prefill", old, new),))


OPEN = "if self.state in _UNCLAIMED or self.state in _LIVE"

GUARDS: tuple[Guard, ...] = (
    _decode(
        "news of the ticket changes nothing once it is claimed",
        "if self.state is HandoffState.ALLOCATED:\n            self.state",
        "if True:\n            self.state",
    ),
    # ---- claim --------------------------------------------------------------------------------
    _decode(
        "a claim names this handoff and this attempt",
        "if (claim.handoff_id, claim.attempt) != (self.handoff_id, self.attempt):",
        "if False:",
    ),
    _decode(
        "a claim names this attempt",
        "if (claim.handoff_id, claim.attempt) != (self.handoff_id, self.attempt):",
        "if claim.handoff_id != self.handoff_id:",
    ),
    _decode(
        "what is over is not granted",
        "if self.state in (HandoffState.CLOSING, HandoffState.CLOSED):\n            return",
        "if False:\n            return",
        Cut("decode", "elif self.state not in _LIVE or self._granted_to", "elif self._granted_to"),
    ),
    _decode(
        "what is admitted is not granted again",
        "elif self.state not in _LIVE or self._granted_to",
        "elif self._granted_to",
    ),
    _decode(
        "nothing is granted from the deadline on",
        'if now >= self.deadline:\n            return self._refuse("expired")',
        "",
    ),
    _decode("one width divides the other", "if narrow < 1 or wide % narrow:", "if False:"),
    _decode("one claimant", " or self._granted_to != who or self._settled:", " or self._settled:"),
    _decode(
        "one process of the claimant",
        "who = (claim.prefill_instance, claim.prefill_epoch, claim.run)",
        'who = (claim.prefill_instance, "e", b"")',
    ),
    _decode(
        "one run of the ticket",
        "who = (claim.prefill_instance, claim.prefill_epoch, claim.run)",
        'who = (claim.prefill_instance, claim.prefill_epoch, b"")',
    ),
    _decode(
        "who was not granted does not settle",
        "if self._granted_to is not None and settled.run != self._granted_to[2]:",
        "if False:",
    ),
    _decode(
        "who has settled is not granted again",
        " or self._granted_to != who or self._settled:",
        " or self._granted_to != who:",
    ),
    # ---- notices ------------------------------------------------------------------------------
    _decode(
        "a notice is of this attempt",
        "if (handoff_id, attempt) != (self.handoff_id, self.attempt):\n"
        '            self.dropped["stale"] += 1\n            return False',
        "",
    ),
    _decode(
        "a notice knows the secret",
        "if not hmac.compare_digest(secret, self.grant.secret):",
        "if False:",
    ),
    _decode(
        "a notice finds the handoff live",
        "if self.state not in _LIVE or now > self._lease_until + self._grace_s:",
        "if self.claimant is None or now > self._lease_until + self._grace_s:",
    ),
    _decode(
        "a notice comes within lease and grace",
        "if self.state not in _LIVE or now > self._lease_until + self._grace_s:",
        "if self.state not in _LIVE:",
    ),
    _decode("a span exists", "if not self._is_sane(span):", "if False:"),
    _decode("a span has layers of the model", "return in_layers and 0 <= wide", "return 0 <= wide"),
    _decode("a span's ranks exist", "0 <= wide < num_wide and wide //", "wide //"),
    _decode("a span's ranks share heads", " and wide // per_narrow == narrow", ""),
    _decode(
        "an ordinal was given",
        'if ordinal not in self._block_of:\n                self.dropped["unknown ordinal"] += 1',
        "if False:",
    ),
    _decode("the same again is no conflict", "if known == checksum:", "if False:"),
    _decode(
        "no layer is announced twice",
        "if known & mask:\n            return False",
        "",
    ),
    _decode(
        "no checksum is announced anew",
        "elif known is not None or not self._announce(span, ordinal):",
        "elif not self._announce(span, ordinal):",
        Cut("decode", "if known & mask:\n            return False", ""),
    ),
    _decode("what has landed is verified", "if self._verify:", "if False:"),
    # ---- verification and admission -----------------------------------------------------------
    _decode(
        "an answer of a verification finds the handoff live",
        'if self.state not in _LIVE:\n            return self._drop("late")\n        assert (span',
        "assert (span",
    ),
    _decode("a mismatch ends the handoff", "if not ok:", "if False:"),
    _decode(
        "a block is proven once",
        "if (span, ordinal) not in self._proven:",
        "if True:",
    ),
    _decode(
        "every block is proven, not only announced",
        "return self.claimant is not None and self._num_unproven == 0",
        "return self.claimant is not None and self._num_unannounced == 0",
    ),
    _decode(
        "every block is there",
        "return self.claimant is not None and self._num_unproven == 0",
        "return bool(self._proven)",
    ),
    _decode(
        "every ranks is there",
        "self._num_rank_pairs = max(self._tp_size, claim.tp_size)",
        "self._num_rank_pairs = 1",
    ),
    _decode(
        "every layer is there",
        "self._num_unannounced = self._num_rank_pairs * self._num_layers * len(self._block_of)",
        "self._num_unannounced = self._num_rank_pairs * len(self._block_of)",
    ),
    _decode(
        "the first token is there",
        "if not self.complete:\n            return []\n        assert self.first is not None",
        "if self._num_unproven:\n            return []",
    ),
    # ---- the first token ----------------------------------------------------------------------
    _decode(
        "a first token is of this attempt",
        "if (first.handoff_id, first.attempt) != (self.handoff_id, self.attempt):",
        "if False:",
    ),
    _decode(
        "a first token finds the handoff live",
        'if self.state not in _LIVE:\n            return self._drop("late")\n        if self.first',
        "if self.first",
    ),
    _decode("one first token", "if self.first is not None:", "if False:"),
    # ---- the end ------------------------------------------------------------------------------
    _decode(
        "what has settled is this attempt",
        "if (settled.handoff_id, settled.attempt) != (self.handoff_id, self.attempt):",
        "if False:",
    ),
    _decode(
        "who has settled has written everything",
        "if self.state in _LIVE and not self._settled and self._num_unannounced:",
        "if False:",
    ),
    _decode(
        "nobody settles before a claim",
        'if self.state in _UNCLAIMED:\n            return self._drop("unclaimed")',
        "",
    ),
    _decode(
        "a failed write ends the handoff",
        "if self.state is HandoffState.CLOSING or num_failed or error:",
        "if self.state is HandoffState.CLOSING:",
    ),
    _decode(
        "a settled handoff leaves quarantine",
        "if self.state is HandoffState.CLOSING or num_failed or error:",
        "if num_failed or error:",
    ),
    _decode(
        "what is over is not cancelled",
        f'{OPEN}:\n            return self._close("cancelled"',
        'if True:\n            return self._close("cancelled"',
    ),
    _decode(
        "what is over does not fail",
        f"{OPEN}:\n            return self._close(reason",
        "if True:\n            return self._close(reason",
    ),
    _decode(
        "who has settled may leave",
        "if self._settled:\n            return []\n        if (\n            self.state in _LIVE",
        "if (\n            self.state in _LIVE",
    ),
    _decode(
        "a lost peer ends what is live",
        "self.state in _LIVE\n            and self.claimant is not None\n            and prefill",
        "self.claimant is not None\n            and prefill",
    ),
    _decode(
        "a lost peer is the claimant",
        "\n            and prefill_instance == self.claimant[0]",
        "",
    ),
    _decode(
        "a peer that is gone is the claimant",
        "if self.claimant != (prefill_instance, prefill_epoch):",
        "if self.claimant is None:",
    ),
    _decode(
        "a peer that is gone is the claimant's process",
        "if self.claimant != (prefill_instance, prefill_epoch):",
        "if self.claimant is None or self.claimant[0] != prefill_instance:",
    ),
    _decode(
        "blocks are feared until the lease's end",
        "if self.state not in _UNCLAIMED and now > self._lease_until + self._grace_s:",
        "if self.state not in _UNCLAIMED and now > self._lease_until - 0.3:",
    ),
    _decode(
        "who was stopped is feared once more",
        "self._lease_until = max(self._lease_until, now)",
        "pass",
    ),
    _decode(
        "who was stopped is feared no shorter",
        "self._lease_until = max(self._lease_until, now)",
        "self._lease_until = now",
    ),
    Guard(
        "blocks are feared through the grace",
        (Cut("decode", "self._lease_until + self._grace_s", "self._lease_until", count=4),),
    ),
    _decode(
        "the deadline counts before a claim",
        "if self.state not in _UNCLAIMED and now > self._lease_until + self._grace_s:",
        "if now > self._lease_until + self._grace_s:",
    ),
    _decode(
        "a handoff ends by its deadline",
        "if now >= self.deadline and (self.state in _UNCLAIMED or self.state in _LIVE):",
        "if False:",
    ),
    _decode(
        "the deadline ends what is not over",
        "if now >= self.deadline and (self.state in _UNCLAIMED or self.state in _LIVE):",
        "if now >= self.deadline:",
    ),
    _decode(
        "quarantine has a timer",
        "if self.state is HandoffState.CLOSING:\n            return self._lease_until",
        "if False:\n            return self._lease_until",
    ),
    _decode(
        "the deadline has a timer",
        "return min(self.deadline, self._lease_until + self._grace_s)",
        "return self.deadline + 1",
    ),
    _decode(
        "blocks that may be written go to quarantine",
        "quarantined = self.state in _LIVE and not self._settled",
        "quarantined = False",
    ),
    _decode(
        "blocks that nobody writes do not",
        "quarantined = self.state in _LIVE and not self._settled",
        "quarantined = self.state in _LIVE",
    ),
    _decode(
        "what is over does not end again when a peer is gone",
        "if self.state in _LIVE:\n            self.close_reason",
        "if True:\n            self.close_reason",
    ),
    _decode(
        "quarantine is left once",
        "if self.state is HandoffState.CLOSING:\n            self.state = HandoffState.CLOSED\n",
        "if self.state is HandoffState.CLOSING:\n",
    ),
    _decode(
        "a lease that is granted again is longer",
        "self._lease_until = now + self.grant.lease_ms / 1e3",
        "self._lease_until = self._lease_until or now + self.grant.lease_ms / 1e3",
    ),
    # ---- the prefill worker -------------------------------------------------------------------
    Guard(
        "nothing is posted after the lease, by the transfer thread neither",
        (
            Cut("prefill", "if not self.error and now >= post_before:", "if False:"),
            Cut("prefill", "remote_blocks, post_before)", "remote_blocks, 1e9)"),
        ),
    ),
    _prefill(
        "the lease has a margin", "self._lease_until - self._margin_s -", "self._lease_until -"
    ),
    _prefill(
        "the margin holds the longest write",
        "self._lease_until - self._margin_s - longest_s",
        "self._lease_until - self._margin_s",
    ),
    _prefill(
        "the lease counts from the claim",
        "self._lease_until = claim_sent_at + self._lease_s",
        "self._lease_until = claim_sent_at + self._lease_s + 0.3",
    ),
    _prefill("who stopped posts nothing more", "if self.error:\n            return []", ""),
    _prefill(
        "what is in flight is pinned",
        "return bool(self._in_flight) or (self.has_unposted and not self.error)",
        "return self.has_unposted and not self.error",
    ),
    _prefill(
        "what is not posted is pinned",
        "return bool(self._in_flight) or (self.has_unposted and not self.error)",
        "return bool(self._in_flight)",
    ),
    _prefill(
        "a failed write ends the posting",
        "self.num_failed += 1\n        self.stop(error)",
        "self.num_failed += 1",
    ),
    _prefill(
        "who gave up says that it failed",
        "num_failed = self.num_failed or (1 if self.error else 0)",
        "num_failed = self.num_failed",
    ),
    _prefill(
        "only blocks that were computed are written",
        "if ordinal < num_blocks and num_posted < num_layers:",
        "if num_posted < num_layers:",
    ),
    _prefill(
        "every ranks is written",
        "for ranks in self._rank_pairs:",
        "for ranks in self._rank_pairs[:1]:",
    ),
    _prefill(
        "blocks are named by their ordinals",
        "tuple(self._remote_block_of[ordinal] for ordinal in ordinals)",
        "tuple(self._remote_block_of.values())[: len(ordinals)]",
    ),
)

# what no schedule misses, because of what is said; all but the last are in GUARDS with what covers
COVERED: tuple[Guard, ...] = (
    # the next condition of `claim` refuses whatever is not live
    _decode(
        "what is over is refused for its reason",
        "if self.state in (HandoffState.CLOSING, HandoffState.CLOSED):\n            return",
        "if False:\n            return",
    ),
    # another checksum for the same layers is also a second announcement of these layers
    _decode(
        "a checksum stays what it was announced as",
        "elif known is not None or not self._announce(span, ordinal):",
        "elif not self._announce(span, ordinal):",
    ),
    # the transfer thread looks at `post_before` again, right before the post
    _prefill(
        "the lease is looked at before blocks are accounted for",
        "if not self.error and now >= post_before:",
        "if False:",
    ),
    # there is no first token before there is a claimant
    _decode(
        "nothing is proven before a claim",
        "return self.claimant is not None and self._num_unproven == 0",
        "return self._num_unproven == 0",
    ),
    # to settle twice does nothing: what has ended stays so, and what has not has settled well
    _decode(
        "settling again is counted",
        "if self._settled or self.may_reuse_blocks:",
        "if False:",
    ),
)
