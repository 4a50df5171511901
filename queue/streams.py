"""The names and settings of the streams behind a JetStream queue."""

import re
from dataclasses import dataclass

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from tandem.queue.config import QueueConfig
from tandem.runtime.clock import wall_seconds

_FORGOTTEN_AFTER_S = 3600.0  # a deployment's consumer that nobody pulls from
_MAX_IN_PROGRESS = 65_536
_MAX_DEDUP_WINDOW_S = 120.0
_MAX_DEAD = 1000  # dead letters that are kept for inspection
_DEAD_HEADER_BYTES = 1024  # room for the reason
CLUSTER = 3  # servers of the smallest NATS cluster that can lose one


def escape(name: str) -> str:
    """Return a name as one token of a stream name or subject; different names stay different."""
    return re.sub(
        r"[^A-Za-z0-9-]", lambda m: "".join(f"={byte:02X}" for byte in m[0].encode()), name
    )


@dataclass(frozen=True, slots=True)
class QueueNames:
    """Names at the broker of the queue of one namespace, model and deployment.

    The deployments of a model share its streams, and have a consumer each.
    """

    stream: str
    stream_subject: str  # of the jobs of all deployments
    subject: str  # one more token follows: the job's number of uncached tokens
    consumer: str
    dead_stream: str
    dead_subject: str

    @classmethod
    def of(cls, namespace: str, model: str, deployment: str) -> "QueueNames":
        namespace, model, deployment = map(escape, (namespace, model, deployment))
        subject = f"tandem.{namespace}.prefill.{model}"
        return cls(
            stream=f"tandem_{namespace}_{model}_tickets",
            stream_subject=f"{subject}.*.*",
            subject=f"{subject}.{deployment}",
            consumer=deployment,
            dead_stream=f"tandem_{namespace}_{model}_prefill_dead",
            dead_subject=f"tandem.{namespace}.prefill_dead.{model}",
        )


async def create_streams(
    jetstream: JetStreamContext, names: QueueNames, config: QueueConfig, num_addresses: int = 1
) -> None:
    """Create or update streams and consumer to match the configuration.

    `num_addresses` of NATS tell a cluster whose streams should outlive one of its servers.
    """
    storage = StorageType.MEMORY if config.storage == "memory" else StorageType.FILE
    replicas = config.replicas or (CLUSTER if num_addresses >= CLUSTER else 1)
    jobs = StreamConfig(
        name=names.stream,
        subjects=[names.stream_subject],
        retention=RetentionPolicy.WORK_QUEUE,
        max_age=wall_seconds(config.max_age_s),
        max_msgs=config.max_jobs,
        max_bytes=config.max_queue_bytes,
        max_msg_size=config.max_job_bytes,
        discard=DiscardPolicy.NEW,  # a job that waits is not lost
        duplicate_window=wall_seconds(min(config.max_age_s, _MAX_DEDUP_WINDOW_S)),
        storage=storage,
        num_replicas=replicas,
    )
    dead = StreamConfig(
        name=names.dead_stream,
        subjects=[names.dead_subject],
        max_msgs=_MAX_DEAD,
        max_bytes=config.max_queue_bytes,
        max_msg_size=config.max_job_bytes + _DEAD_HEADER_BYTES,
        discard=DiscardPolicy.OLD,
        storage=storage,
        num_replicas=replicas,
    )
    for stream in (jobs, dead):
        try:
            await jetstream.add_stream(stream)
        except nats.js.errors.BadRequestError:  # it is there, configured differently
            await jetstream.update_stream(stream)
    await jetstream.add_consumer(
        names.stream,
        ConsumerConfig(
            durable_name=names.consumer,
            filter_subject=f"{names.subject}.*",
            inactive_threshold=_FORGOTTEN_AFTER_S,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=wall_seconds(config.ack_wait_s),
            max_deliver=-1,  # a broker drops a job without notice; the queue counts instead
            max_ack_pending=_MAX_IN_PROGRESS,
        ),
    )
