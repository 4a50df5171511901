"""Latencies against the targets in force, and their predictions."""

from tools.dashboards.panels import Alert, Dashboard, Panel
from tools.dashboards.queries import count, level, quantile, total


def _over_target(metric: str, target: str) -> str:
    limit = level("decode_target_seconds", "model", take="max", target=target)
    return f"{quantile(0.99, metric, 'model')} / on (model) {limit}"


TARGETS = Dashboard(
    "targets",
    "Tandem: targets",
    (
        Panel(
            "p99 of the time to the first token, over its target",
            (_over_target("frontend_time_to_first_token_seconds", "ttft"),),
            "short",
            "The target is `disagg.ttft_target_ms`. Look at the parts of a handoff and at waiting "
            "prompt tokens: `queue` is long: prefill workers; local prompts wait: decode workers.",
            limit=1,
            alert=Alert("TandemTtftMissed", "5m"),
        ),
        Panel(
            "p99 of the time between tokens, over its target",
            (_over_target("frontend_inter_token_latency_seconds", "itl"),),
            "short",
            "The target is `disagg.itl_target_ms`. Steps are long: too many sequences for a "
            "worker (add one, lower `engine.max_num_seqs`), or long prompts beside answers (send "
            "them to prefill workers).",
            limit=1,
            alert=Alert("TandemItlMissed", "5m"),
        ),
        Panel(
            "Time to the first token",
            tuple(
                quantile(q, "frontend_time_to_first_token_seconds", "model")
                for q in (0.5, 0.9, 0.99)
            ),
            "s",
            "A p99 far above the median: some prompts wait. Compare local and remote in the panel "
            "below.",
        ),
        Panel(
            "Time between tokens",
            tuple(
                quantile(q, "frontend_inter_token_latency_seconds", "model")
                for q in (0.5, 0.9, 0.99)
            ),
            "s",
            "A p99 far above the median: prompts are computed between the steps of running "
            "answers.",
        ),
        Panel(
            "p99 of the first token at the worker, by place",
            (quantile(0.99, "decode_first_token_seconds", "place"),),
            "s",
            "`remote` above `local` for long: too few prefill workers, or thresholds that send "
            "away too much.",
        ),
        Panel(
            "Median of actual over predicted time to the first token",
            (quantile(0.5, "prediction_error", "place"),),
            "short",
            "The adaptive policy decides on wrong numbers: other processes share the workers' "
            "cores or GPUs. `disagg.policy threshold` decides by length alone.",
            limit=2,
        ),
        Panel(
            "p99 of the time to a whole answer",
            (quantile(0.99, "frontend_request_duration_seconds", "model"),),
            "s",
            "Compare with the length of answers: longer answers take longer.",
        ),
        Panel(
            "Mean tokens of prompts and of answers",
            tuple(
                f"{total(name, 'model')} / {count(name, 'model')}"
                for name in ("frontend_input_sequence_tokens", "frontend_output_sequence_tokens")
            ),
            "short",
            "The load itself changed, when these moved together with a target.",
        ),
    ),
)
