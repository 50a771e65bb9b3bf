"""TCP ports that tests keep while no server listens on them."""

from __future__ import annotations

import socket
import sys
import weakref


class HeldPort:
    """A free TCP port of 127.0.0.1, for servers that a test starts one after another.

    While no server runs, the system could give the port to another process. A socket that is bound to the port, but
    does not listen, prevents this. On Linux a server that names the port can bind it nevertheless, since both sockets
    have SO_REUSEADDR. The port is released with this object.
    """

    def __init__(self) -> None:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self.number: int = held.getsockname()[1]
        if sys.platform == "linux":
            weakref.finalize(self, held.close)
        else:  # other systems would refuse the server's socket
            held.close()
