"""Emulated accelerators: steps that take a device's time, and tokens that prove the KV."""
