"""The parameters of the hostile soak: its length, its load and the bounds of its verdict."""

from dataclasses import dataclass

from tests.soak.attacks.target import Attack
from tests.soak.attacks.to_apis import API_ATTACKS
from tests.soak.attacks.to_etcd import ETCD_ATTACKS
from tests.soak.attacks.to_http import HTTP_ATTACKS
from tests.soak.attacks.to_nats import NATS_ATTACKS
from tests.soak.attacks.to_workers import WORKER_ATTACKS

ATTACKS: tuple[Attack, ...] = (
    *HTTP_ATTACKS,
    *API_ATTACKS,
    *NATS_ATTACKS,
    *ETCD_ATTACKS,
    *WORKER_ATTACKS,
)

CLUSTER_TOKEN = "a secret of the cluster"
ATTACK_LIMIT_S = 60.0  # a single attack hangs beyond it
GOOD_GAP_S = 0.5  # reported; two quiet cores keep it
HANG_GAP_S = 10.0  # a stream stands still beyond it
LOCAL_LIMIT_S = 30.0  # honest prompts that have to be remote were all local for so long
RSS_GROWTH_BYTES = 64 * 1024 * 1024  # of each process, after the attacks


@dataclass(frozen=True, slots=True)
class Plan:
    """A soak: every attack at least once, and all of them in turn until the time is over."""

    duration_s: float
    seed: int = 1
    num_questions: int = 16
    num_honest_streams: int = 3
    num_attacks_at_once: int = 2
    attacks: tuple[Attack, ...] = ATTACKS


PLAN = Plan(duration_s=60.0)
