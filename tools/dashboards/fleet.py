"""The processes, their requests and the work that waits."""

from tools.dashboards.panels import Alert, Dashboard, Panel
from tools.dashboards.queries import change, increase, level, rate, share

PROCESS = "instance, role"

FLEET = Dashboard(
    "fleet",
    "Tandem: fleet",
    (
        Panel(
            "Processes that answer Prometheus",
            (f'min by ({PROCESS}) (up{{job="tandem"}})',),
            "short",
            "The process is registered, and does not answer: `tandem status` shows its state. One "
            "that is stopped (`ps`: state T) goes on with SIGCONT; one that hangs is to be ended, "
            "and its log read.",
            limit=1,
            is_floor=True,
            alert=Alert("TandemProcessSilent", "30s"),
        ),
        Panel(
            "Decode workers that requests can go to",
            (level("frontend_decode_workers", "model", take="min"),),
            "short",
            "No request of this model can be answered: start a decode worker, and read the log of "
            "the last one. A model that was taken away on purpose stays at 0 until its frontends "
            "restart.",
            limit=1,
            is_floor=True,
            alert=Alert("TandemNoDecodeWorker", "30s", "critical"),
        ),
        Panel(
            "Share of requests that failed here",
            (share("frontend_requests_total", "model", status="5.."),),
            "percentunit",
            "Each failure has a line in the frontend's log, with the request's id and cause. 503: "
            "workers are missing or full. 500: a bug, or a worker that was lost too often for one "
            "answer.",
            limit=0.01,
            alert=Alert("TandemRequestsFail", "2m", "critical"),
        ),
        Panel(
            "Requests per second, by status",
            (rate("frontend_requests_total", "status"),),
            "reqps",
            "Compare with the other panels: 499 are clients that left before the end, and 429 "
            "those over the limit of their key.",
        ),
        Panel(
            "Requests in hand",
            (level("frontend_inflight_requests", "model"),),
            "short",
            "Rises without an end: answers are slower than requests come. Look at the targets, "
            "and add decode workers.",
        ),
        Panel(
            "Answers that had to change their worker, per second",
            (rate("frontend_migrations_total", "model, kind"),),
            "reqps",
            "A decode worker was lost in mid-answer; the answers go on elsewhere. Find it by the "
            "panel of silent processes or in `tandem status`, and read its log: status 72 is a "
            "lost GPU.",
            limit=0,
            alert=Alert("TandemDecodeWorkerLost", "0s"),
        ),
        Panel(
            "Prompt tokens not yet computed",
            (
                level("worker_prompt_tokens", "model, state"),
                level("decode_queued_tokens", "model", take="max"),
            ),
            "short",
            "For planners: work ahead of a new request, in the workers by state and (without a "
            "state) in the prefill queue. Grows over minutes: add workers of the role that it "
            "waits for.",
        ),
        Panel(
            "Jobs that no prefill worker could do, in the last hour",
            (change("decode_queued_jobs", "model", over="1h", state="dead"),),
            "short",
            "The prefill worker's log names the job and the reason. Delivered too often: prefill "
            "workers die on it. Not a job: something else writes to the queue.",
            limit=0,
            alert=Alert("TandemDeadLetters", "0s"),
        ),
        Panel(
            "Kernels built while serving, in the last hour",
            (increase("kernels_built_while_serving_total", "instance", over="1h"),),
            "short",
            "Each held up the worker's answers for seconds: the warm-up has a hole. Please report "
            "the line of the worker's log that names the kernel.",
            limit=0,
            alert=Alert("TandemKernelBuiltWhileServing", "0s"),
        ),
    ),
)
