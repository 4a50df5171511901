"""Topologies of the same hardware beside all its workers unsplit."""
