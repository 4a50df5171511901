"""Measurements: load on a server, and the parts of Tandem alone.

`cli.py` is `tandem bench`; each other folder is one benchmark, or what they share: `client`,
`report`. It may import every room but `launch`, whose commands it starts as processes. Begin with
`load/session.py`.
"""
