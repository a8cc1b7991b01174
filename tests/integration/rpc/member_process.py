"""All that Holdfast serves over the network, in one process: gRPC, REST, the data plane.

Prints where, as JSON; ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys

from holdfast.core.slot_names import SlotName, SlotState
from holdfast.v1 import common_pb2, metadata_pb2_grpc
from holdfast_services.kit.rest import RestServer, make_app
from holdfast_services.kit.server import bind, make_server
from holdfast_services.transport import ServedSegments
from holdfast_services.transport.tcp import TcpTransport

KEY = "r1/5/1/0/0"
DATA = b"segment" * 10_000
SLOT = SlotName("s1", 4, SlotState.SEALED)


class Servicer(metadata_pb2_grpc.MetadataServicer):
    """Answers; whoever says ``wait`` waits for one who says ``go``."""

    def __init__(self) -> None:
        self._waits, self._goes = asyncio.Event(), asyncio.Event()

    async def Handshake(self, request, context):
        match request.software_version:
            case "wait":
                self._waits.set()
                await self._goes.wait()
            case "go":
                await self._waits.wait()
                self._goes.set()
        return common_pb2.HandshakeResponse(software_version="1")


async def main():
    server = make_server()
    metadata_pb2_grpc.add_MetadataServicer_to_server(Servicer(), server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    rest, app = RestServer("127.0.0.1:0"), make_app("member", ())

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    await rest.begin(app)
    served = ServedSegments()
    served.put(KEY, SLOT, memoryview(DATA))
    transport = TcpTransport()
    endpoint = transport.serve(served)[0]
    places = {"rpc": f"127.0.0.1:{port}", "rest": rest.url, "data": endpoint.address}
    print(json.dumps(places), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    transport.close()
    rest.close()
    await rest.ended()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
