"""Moving KV: layouts, checksums, transports, and the handoff at both ends.

The files at the root are the arithmetic and the transports (`transport.py` is their seam); `agents`
run them on threads, one per rank; `handoff` has two pure state machines and what carries them out.
It imports `kernels` and `runtime`, never an engine. Begin with `handoff/decode.py` and
`agents/group.py`.
"""
