"""The scripts of a deployment's two kinds of jobs. Pure."""

import shlex

from tandem.launch.slurm.deployment import Deployment, JobOptions

SERVICE, WORKER = "service.sh", "worker.sh"

_TEMPLATE = """\
#!/bin/bash
# {title}
{directives}
state={state}
echo "$(date -u +%FT%TZ) {what} starts on $(hostname): job $SLURM_JOB_ID, \
requeued ${{SLURM_RESTART_COUNT:-0}} times"

# USR2, of `tandem slurm`: {leaves}
leave() {{ leaving=1; [ -z "$process" ] || kill -TERM "$process" 2>/dev/null; }}
# USR1, {notice_s} s before the time is up: a successor is queued first.
expire() {{ {before}sbatch {successor} "$state/{script}"; leave; }}
trap leave USR2
trap expire USR1
trap 'leaving=1' TERM  # of Slurm, which sends it to all processes

. "$state/secrets"
{wait}# --requeue covers lost nodes alone. A process that died starts here again, twice;
# then its job is requeued, at most {requeues} times.
for attempt in 1 2 3; do
    {command} &
    process=$!
    [ -z "$leaving" ] || leave
    echo "$(hostname) $process" > "$state/workers/$SLURM_JOB_ID"
    while kill -0 "$process" 2>/dev/null; do wait "$process"; done  # a signal interrupts `wait`
    wait "$process"
    code=$?
    [ "$code" -ge 0 ] || code=0  # bash 5.2 lost it: the process ended as a signal to leave came
    echo "$(date -u +%FT%TZ) {what} ended with $code"
    case $code in 0 | 2) leaving=1 ;; esac  # 2: a setting is wrong, and would be so again
    [ -z "$leaving" ] || break
done
rm -f "$state/workers/$SLURM_JOB_ID"
if [ -z "$leaving" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
# The nodes of the other service jobs, which one that stands by must not share.
_OTHERS = """\
others=$(squeue -h --me -t R -n {names} -o "%i %N" |
        grep -v "^$SLURM_JOB_ID " | cut -d" " -f2 | paste -sd,)
    """
_WAIT = """\
until [ -s "$state/services.json" ] || [ -n "$leaving" ]; do sleep 0.2; done
[ -z "$leaving" ] || exit 0
"""


def render(deployment: Deployment) -> dict[str, str]:
    """Return the scripts by file name: each at most 60 lines."""
    return {SERVICE: _service(deployment), WORKER: _worker(deployment)}


def _service(deployment: Deployment) -> str:
    command = [*deployment.launch, "slurm", "service", "--state-dir", deployment.folder]
    return _TEMPLATE.format(
        title=f"The service job of the deployment {deployment.name}: NATS, etcd and the frontend.",
        directives=_directives(deployment, deployment.name, "service", deployment.service),
        state=shlex.quote(deployment.folder),
        what="the service job",
        leaves="the frontend finishes its answers.",
        notice_s=deployment.notice_s,
        before=_OTHERS.format(names=f"{deployment.name},{deployment.standby_job}"),
        successor='--dependency=singleton --job-name="$SLURM_JOB_NAME" '
        '${others:+--exclude="$others"}',
        script=SERVICE,
        wait="",
        command=shlex.join(command),
        requeues=deployment.max_requeues,
    )


def _worker(deployment: Deployment) -> str:
    command = [*deployment.launch, "worker", deployment.model, "--role", deployment.role]
    if deployment.model_name is not None:
        command += ["--served-model-name", deployment.model_name]
    if not deployment.worker.gpus:
        command += ["--gpu", "cpu"]
    command += [f"--runtime.interface={deployment.interface}"]
    files = '--config "$state/config.yaml" --runtime.services_file="$state/services.json"'
    return _TEMPLATE.format(
        title=f"A worker of the deployment {deployment.name}: one element of an array of jobs.",
        directives=_directives(deployment, deployment.worker_job, "worker-%a", deployment.worker),
        state=shlex.quote(deployment.folder),
        what="worker $SLURM_ARRAY_TASK_ID",
        leaves="no new work comes, running answers go on elsewhere.",
        notice_s=deployment.notice_s,
        before="",
        successor='--array="$SLURM_ARRAY_TASK_ID"',
        script=WORKER,
        wait=_WAIT,
        command=f"{shlex.join(command)} \\\n        {files}",
        requeues=deployment.max_requeues,
    )


def _directives(deployment: Deployment, job: str, log: str, options: JobOptions) -> str:
    words = [
        f"--job-name={job}",
        f"--output={deployment.folder}/logs/{log}.log",
        "--open-mode=append",
        "--nodes=1",
        "--ntasks=1",
        "--requeue",
        f"--signal=B:USR1@{deployment.notice_s}",
    ]
    if job == deployment.worker_job:  # the services are on the network in any case
        words.append("--exclusive=user")
    if options.partition is not None:
        words.append(f"--partition={options.partition}")
    if options.time is not None:
        words.append(f"--time={options.time}")
    if options.gpus:
        words.append(f"--gres=gpu:{options.gpus}")
    if options.cpus:
        # a task of N of Slurm's CPUs would get N / 2 cores where each has two threads
        words += [f"--cpus-per-task={options.cpus}", "--threads-per-core=1"]
    return "\n".join(f"#SBATCH {shlex.quote(word)}" for word in [*words, *options.others])
