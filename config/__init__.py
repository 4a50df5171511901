"""Tandem's configuration: one model per room, composed, with the origin of every value.

Sources are a YAML file, the environment, flags and live values in etcd; topologies are files of
roles. It imports the rooms' `config.py` and `runtime`; rooms never import it, they are given their
own section. Begin with `model.py`, then `sources.py`; `docs.py` writes docs/configuration.md.
"""
