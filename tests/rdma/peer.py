"""A node that serves a segment over RDMA: ``python -m tests.rdma.peer HOST PARTS AT COMMAND …``.

Says its address, then serves until its input ends. At look-up number ``AT`` it runs ``COMMAND``.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.rdma.segments import mapped_segment, serving

from holdfast_services.transport.rdma.transport import RdmaTransport, find_places


class Source:
    """Serves, and runs a command at one of the look-ups."""

    def __init__(self, parts_count: int, at: int, command: list[str]) -> None:
        self._served = serving(mapped_segment(parts_count))
        self._at = at
        self._command = command
        self._asked = 0

    def lookup(self, key: str, incarnation: int) -> memoryview | None:
        self._asked += 1
        if self._asked == self._at:
            subprocess.run([word.format(pid=os.getpid()) for word in self._command], check=True)
        return self._served.lookup(key, incarnation)


def main(host: str, parts_count: str, at: str, *command: str) -> None:
    transport = RdmaTransport(find_places((), 0), host)
    [endpoint] = transport.serve(Source(int(parts_count), int(at), list(command)))
    print(endpoint.address, flush=True)
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
