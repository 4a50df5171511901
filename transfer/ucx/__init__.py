"""The UCX transport, without NIXL."""
