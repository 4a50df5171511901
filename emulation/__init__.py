"""Emulated accelerators: a runner whose steps take a device's time, and whose tokens prove the KV."""
