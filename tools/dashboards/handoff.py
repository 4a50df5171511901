"""The place of each prompt, and the way of its KV from prefill to decode worker."""

from tools.dashboards.panels import Alert, Dashboard, Panel
from tools.dashboards.queries import level, mean, quantile, rate, share

IDLE_TOKENS = 100  # of prompts, on the mean: a worker with fewer counts as idle

HANDOFF = Dashboard(
    "handoff",
    "Tandem: handoff",
    (
        Panel(
            "Prompts by the place of their prefill",
            (rate("decode_prefills_total", "place"),),
            "reqps",
            "All local although there are prefill workers: the next panel has the causes.",
        ),
        Panel(
            "Why prompts stayed local",
            (rate("decode_prefills_total", "cause", place="local"),),
            "reqps",
            "docs/metrics.md lists the causes. `no_prefill_worker`: start one, or see in `tandem "
            "status` why it does not fit. `queue_lost`: NATS is away. `silent`: prefill workers "
            "are stopped, or NATS loses their reports. `no_blocks`: the KV dashboard.",
        ),
        Panel(
            "Prompt tokens that wait at a decode worker while a prefill worker idles",
            (
                mean("worker_prompt_tokens", "model", take="max", state="waiting", role="!prefill")
                + " * on (model) (min by (model) ("
                + mean("worker_prompt_tokens", "model, instance", state="!remote", role="!decode")
                + f") < bool {IDLE_TOKENS})",
            ),
            "short",
            "Prompts wait although a worker that takes them has nothing to do: `tandem status` "
            "says where, and the commonest reason; `tandem explain` has the predictions for one "
            "request. The panel above has the causes; docs/tuning.md says what to do about each.",
            limit=2000,
            alert=Alert("TandemPrefillIdle", "5m"),
        ),
        Panel(
            "Share of prompts that the full prefill queue kept local",
            (share("decode_prefills_total", "model", cause="queue_full"),),
            "percentunit",
            "Only with `disagg.policy threshold`. Prefill workers are too few for the prompts: "
            "add one, raise `disagg.max_prefill_queue_size` where waiting is better than computing "
            "between running answers, or set `disagg.policy adaptive`, which predicts the wait.",
            limit=0.1,
            alert=Alert("TandemPrefillQueueFull", "5m"),
        ),
        Panel(
            "Share of handoffs that were tried in vain",
            (share("decode_handoffs_total", "model", end="!admitted|cancelled|taken_back"),),
            "percentunit",
            "The next panel has how they ended. Each such prompt was computed twice, and its "
            "answer is right.",
            limit=0.01,
            alert=Alert("TandemHandoffsFail", "2m"),
        ),
        Panel(
            "Handoffs by how they ended, per second",
            (rate("decode_handoffs_total", "end"),),
            "reqps",
            "`unclaimed`: more prefill workers. `deadline`: `disagg.handoff_timeout_ms_per_token` "
            "is too short for them. `peer_lost`: their logs. `corrupt`: see the panel of corrupt "
            "blocks.",
        ),
        Panel(
            "Corrupt KV blocks that were caught, per second",
            (
                rate("decode_handoffs_total", "model", end="corrupt"),
                rate(
                    "decode_kv_mismatches_total",
                    "prefill_instance, model",
                    quiet="decode_excluded_prefill_workers",
                ),
            ),
            "short",
            "No client saw them. The same `prefill_instance` again: its memory, GPU or link; take "
            "it out. All of them: the decode worker's memory.",
            limit=0,
            alert=Alert("TandemCorruptKv", "0s", "critical"),
        ),
        Panel(
            "Prefill workers that are excluded",
            (level("decode_excluded_prefill_workers", "model, instance"),),
            "short",
            "Their KV failed verification repeatedly: `tandem status` names them. Take them out "
            "and look at their memory and network; they come back when restarted.",
            limit=0,
            alert=Alert("TandemPrefillWorkerExcluded", "0s", "critical"),
        ),
        Panel(
            "p99 of each part of a handoff",
            (quantile(0.99, "decode_handoff_interval_seconds", "interval"),),
            "s",
            "docs/metrics.md has a remedy for each part (intervals of a handoff). `queue`: more "
            "prefill workers. `exposed_transfer`: `tandem doctor`.",
            limit=1,
        ),
        Panel(
            "Measured rate of each link",
            (level("prefill_link_bytes_per_second", "instance, decode_instance"),),
            "Bps",
            "One link is slower than the others of its kind: `tandem doctor` at both ends, and "
            "UCX_TLS.",
        ),
        Panel(
            "KV written to decode workers",
            (rate("prefill_written_bytes_total", "instance"),),
            "Bps",
            "Near the measured rate of the links: the network is full; another prefill worker "
            "wins nothing.",
        ),
        Panel(
            "Share of writes that failed",
            (share("prefill_writes_total", "model, instance", outcome="failed"),),
            "percentunit",
            "A link breaks: the prefill worker's log has the error of the transport. A decode "
            "worker that ended explains a few.",
            limit=0.01,
        ),
        Panel(
            "Prefill jobs by how they ended, per second",
            (rate("prefill_jobs_total", "end"),),
            "reqps",
            "`stale` and `expired`: tickets wait too long. `failed` and `connection_lost`: the "
            "logs of both workers, by the handoff's id.",
        ),
    ),
)
