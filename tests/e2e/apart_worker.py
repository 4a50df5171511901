"""The `tandem` command with ranks that keep a KV pool each and move its KV themselves, as on GPUs.

Their devices are CPUs, which gather by gloo. The first argument is the program of ranks above 0, or
empty.
"""

import os
import sys

from tandem.engine.execution import followers
from tandem.launch.cli.main import main
from tandem.worker import worker

if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    followers.are_apart = lambda config: True
    if rank_process := sys.argv.pop(1):
        worker._RANK_PROCESS = rank_process
    main()
