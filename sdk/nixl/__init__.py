"""Transfers of KV blocks between engines with their own cache."""

from tandem.sdk.nixl.agent import nixl_agent
from tandem.sdk.nixl.connector import BlockTransfer, NixlConnector
from tandem.sdk.nixl.handles import nixl_agent_config

__all__ = ["BlockTransfer", "NixlConnector", "nixl_agent", "nixl_agent_config"]
