"""Moving KV blocks between engines that bring their own cache."""

from tandem.sdk.nixl.connector import (
    BlockTransfer,
    NixlConnector,
    nixl_agent,
    nixl_agent_config,
)

__all__ = ["BlockTransfer", "NixlConnector", "nixl_agent", "nixl_agent_config"]
