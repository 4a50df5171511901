"""The `tandem` command, and the supervisor of the processes that it starts.

`cli` has the commands; each imports the folder that carries it out: `run` for one role, `serve` and
`graph` for several under `supervise`, `cluster` and `top` for one that runs, `simulation` and
`doctor`. It may import every room, and no room imports it. Begin with `cli/main.py`.
"""
