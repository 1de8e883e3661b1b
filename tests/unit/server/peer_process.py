"""A node in a process of its own, to be killed or frozen: it serves Push, echoes hellos, and prints its port."""

from __future__ import annotations

import asyncio

from grpc import aio

from nsqha.server.peers import listener as front_door
from nsqha.server.peers.api import PeerStream
from nsqha.server.peers.calls import GrpcPeerServer, server_options
from tests.unit.server.peer_rig import SERVICES, Recorder, reply


async def main() -> None:
    def accept(stream: PeerStream) -> Recorder:
        return Recorder(lambda message: stream.send(reply(message.hello.registration)))

    peers = GrpcPeerServer(SERVICES)
    peers.on_stream("Push", accept)
    server = aio.server(options=server_options())
    peers.add_to(server)
    door = await front_door.serve(peers, server, "127.0.0.1:0", None)
    print(door.address.rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
