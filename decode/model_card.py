"""The model card of a decode worker."""

import time

from tandem.engine.core.engine import Engine
from tandem.runtime.address import EndpointAddress
from tandem.runtime.membership.model_files import files_digest
from tandem.runtime.membership.node import Node
from tandem.runtime.wire.cluster_messages import ModelCard
from tandem.runtime.wire.messages import ModelFiles


def model_card(
    node: Node,
    endpoint: EndpointAddress,
    engine: Engine,
    files: ModelFiles,
    weights_digest: str,
    *,
    supports_grammar: bool,
) -> ModelCard:
    """Return the card of the model that a decode worker serves at `endpoint`."""
    return ModelCard(
        name=node.model,
        context_length=engine.max_model_len,
        block_size=engine.block_pool.block_size,
        vocab_size=engine.runner.model_config.vocab_size,
        files_digest=files_digest(files),
        instance_id=node.instance_id,
        created_s=int(time.time()),
        endpoint=str(endpoint),
        sends_kv_events=True,
        weights_digest=weights_digest,
        supports_grammar=supports_grammar,
        supports_token_rules=True,
    )
