"""The KV pools: use, preemptions, quarantine and prefix caches."""

from tools.dashboards.panels import Alert, Dashboard, Panel
from tools.dashboards.queries import level, rate, total


def _pool_usage(role: str) -> str:
    idle = level(f"{role}_kv_blocks", "model, instance", state="free|cached")
    return f"1 - {idle} / {level(f'{role}_kv_blocks', 'model, instance', state='total')}"


KV = Dashboard(
    "kv",
    "Tandem: KV",
    (
        Panel(
            "Decode workers: part of the KV pool in use",
            (_pool_usage("decode"),),
            "percentunit",
            "New prompts wait for blocks: add a decode worker, or memory "
            "(`engine.kv_memory_fraction`), or lower `engine.max_num_seqs`.",
            limit=0.95,
            alert=Alert("TandemKvPoolFull", "5m"),
        ),
        Panel(
            "Prefill workers: part of the KV pool in use",
            (_pool_usage("prefill"),),
            "percentunit",
            "Jobs wait for room: lower `prefill.max_batch_tokens`, or add a prefill worker.",
            limit=0.95,
        ),
        Panel(
            "Sequences that gave up their blocks, per second",
            (rate("decode_preemptions_total", "model, instance"),),
            "short",
            "They are computed again: the pool is too small for `engine.max_num_seqs`. Lower it, "
            "or give the pool more memory.",
            limit=0.01,
            alert=Alert("TandemPreemptions", "5m"),
        ),
        Panel(
            "Sequences by state",
            (level("decode_sequences", "state"),),
            "short",
            "Many `waiting`: blocks or batch rows are missing, see the pool. Many `remote`: see "
            "the handoff dashboard.",
        ),
        Panel(
            "Blocks in quarantine",
            (level("decode_kv_blocks", "model, instance", state="quarantined"),),
            "short",
            "A prefill worker was lost or stopped in mid-write, and may still write. It should be "
            "over within the lease: end or continue a stopped prefill worker (`ps`: state T).",
            limit=0,
            alert=Alert("TandemQuarantineStays", "2m"),
        ),
        Panel(
            "Blocks of decode workers, by state",
            (level("decode_kv_blocks", "state"),),
            "short",
            "The rest is held by sequences.",
        ),
        Panel(
            "Share of prompt tokens that a prefix cache had",
            (
                total("frontend_cached_tokens", "model")
                + " / "
                + total("frontend_input_sequence_tokens", "model"),
            ),
            "percentunit",
            "It fell although the prompts are the same: pools are too small to keep prefixes, or "
            "requests go to other workers (`router.overlap_weight`).",
        ),
        Panel(
            "Prompt tokens at prefill workers, by source",
            (rate("prefill_tokens_total", "source"),),
            "short",
            "Much `computed` of prompts that begin alike: give prefill workers a larger pool.",
        ),
    ),
)
