"""Makes two TAP devices and carries frames between them, each of which waits for some seconds.

Run as `delay_relay.py DEVICE DEVICE SECONDS`; it prints a line once both devices are there.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MAX_FRAME_BYTES = 65_536


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def relay(one: int, other: int, delay_s: float) -> None:
    """Carry frames for ever."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # due at, to, frame
    while True:
        pause_s = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        for device in select.select([one, other], [], [], pause_s)[0]:
            due_s = time.perf_counter() + delay_s
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(device, _MAX_FRAME_BYTES)
                    waiting.append((due_s, other if device == one else one, frame))
        while waiting and waiting[0][0] <= time.perf_counter():
            _, device, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # of a device that is down: the frame is lost
                os.write(device, frame)


if __name__ == "__main__":
    near, far = _tap(sys.argv[1]), _tap(sys.argv[2])
    print("ready", flush=True)
    relay(near, far, float(sys.argv[3]))
