"""What `tandem status` says of an author's worker."""

from tandem.launch.cluster.status import read_cluster
from tandem.runtime.store.discovery import register_model
from tandem.runtime.wire.cluster_messages import ModelCard
from tests.config.configs import config_of
from tests.sdk.kit_pair import Pair


async def test_a_worker_of_a_namespace_of_its_own_is_shown_with_its_model_and_load(
    pair: Pair,
) -> None:
    client = await pair.serve(lambda request: request, "mine.backend.generate")
    worker, config = pair.worker, pair.worker.config
    card = ModelCard(
        name="m",
        context_length=1,
        block_size=16,
        vocab_size=1,
        files_digest="",
        instance_id=worker.instance_id,
        created_s=0,
        endpoint=str(client.address),
    )
    await register_model(worker, config.namespace, card)
    flags = [f"--runtime.{name}={getattr(config, name)}" for name in (
        "namespace", "nats_url", "etcd_endpoints"
    )]  # fmt: skip
    report = await read_cluster(config_of(*flags))
    [shown] = report.instances
    assert (shown.instance.namespace, shown.instance.model) == ("mine", "m")
    assert shown.state == "serving"
    assert shown.worker is not None and shown.worker.load.num_running == 0
    assert report.queues == []
