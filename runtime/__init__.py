"""Parts of every process: errors, requests' contexts, tasks, addresses, TLS, the pace of time.

The files at the root know no folder; `wire`, `plane`, `store`, `bus` and `tracing` are what goes
between processes, `process` and `local` what is around one, and `membership` joins one to its
cluster. This room imports no other and no torch. Begin with `errors.py`, `wire/messages.py` and
`membership/node.py`.
"""
