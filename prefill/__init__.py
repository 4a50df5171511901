"""The prefill role: tickets from the queue, their blocks computed and written to decode workers.

`job.py` is one ticket from the queue to its acknowledgment. It imports engine, queue, transfer and
worker, and never `decode`. Begin with `worker.py`.
"""
