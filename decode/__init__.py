"""The decode role: where each prompt is computed, and the handoffs that bring KV here.

`admission.py` is the pure policy; `worker.py` is the role in a worker, `handoff.py` one remote
prefill. It imports engine, queue, router, transfer and worker, and never `prefill`. Begin with
`worker.py`.
"""
