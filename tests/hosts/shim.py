"""Relay of Ethernet frames between two TAP devices that delays them and limits their rate.

Usage: ``python shim.py NEAR FAR DELAY_S BYTES_PER_S``, in the network namespace that is to have the devices. It creates
both, prints a line, and relays until its standard input ends, so it never outlives the process that started it.

``tc netem`` does the same in the kernel, but many kernels lack it. A TAP device gets whole frames with checksums, which
a packet socket on a veth device does not: there, checksums and segmentation are left to the hardware.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

LIMIT = 1000
"""Frames in each direction; more are dropped. This is the default of ``tc netem``."""
_LARGEST = 65536
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
"""From linux/if_tun.h."""


class Line:
    """One direction of a link.

    A frame leaves at ``max(arrival, departure of the frame before) + size / rate`` and arrives ``delay_s`` later.

    Args:
        delay_s: seconds.
        bytes_per_s: rate; frames count with their Ethernet headers.
    """

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._frames: deque[tuple[float, bytes]] = deque()

    def push(self, frame: bytes, now: float) -> None:
        """Queue a frame, or drop it if the queue is full."""
        if len(self._frames) >= LIMIT:
            return
        self._free_at = max(now, self._free_at) + len(frame) / self._bytes_per_s
        self._frames.append((self._free_at + self._delay_s, frame))

    def due_at(self) -> float | None:
        """Return when the next frame arrives; None if there is none."""
        return self._frames[0][0] if self._frames else None

    def pop(self, now: float) -> bytes | None:
        """Return the next frame if it has arrived."""
        return self._frames.popleft()[1] if self._frames and self._frames[0][0] <= now else None


def open_tap(name: str) -> int:
    """Create a TAP device, which lasts as long as the file that is returned is open."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return file


def relay(near: int, far: int, delay_s: float, bytes_per_s: float) -> None:
    """Relay frames in both directions until standard input ends."""
    lines = {near: Line(delay_s, bytes_per_s), far: Line(delay_s, bytes_per_s)}
    exits = {near: far, far: near}
    control = sys.stdin.fileno()
    while True:
        due = [at for line in lines.values() if (at := line.due_at()) is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([near, far, control], [], [], wait_s)
        if control in readable:
            return
        for tap in readable:
            lines[tap].push(os.read(tap, _LARGEST), time.monotonic())
        for tap, line in lines.items():
            while (frame := line.pop(time.monotonic())) is not None:
                try:
                    os.write(exits[tap], frame)
                except OSError as error:
                    if error.errno != errno.EIO:  # the device is down, as after its creation
                        raise


def main() -> None:
    """Create the devices and relay between them."""
    near, far, delay_s, bytes_per_s = sys.argv[1:]
    taps = open_tap(near), open_tap(far)
    print("ready", flush=True)  # noqa: T201 - the starting process waits for this line
    relay(*taps, float(delay_s), float(bytes_per_s))


if __name__ == "__main__":
    main()
