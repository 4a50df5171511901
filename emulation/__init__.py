"""Emulated accelerators: steps that take a device's time, and tokens that prove the KV.

Profiles of devices are the YAML files below. It imports engine, runtime and transfer. Begin with
`profile.py`.
"""
