"""The worker process: the parts that both roles stand on, and the change between roles.

It imports engine, emulation, grammar, queue, transfer and runtime, and neither role. Begin with
`worker.py`.
"""
