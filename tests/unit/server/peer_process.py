"""A node in a process of its own, to be killed or frozen: it serves Push, echoes hellos, and prints its port."""

from __future__ import annotations

import asyncio

from nsqha.server.peers.api import PeerStream
from nsqha.server.peers.calls import GrpcPeerServer
from nsqha.server.peers.listener import PeerListener
from nsqha.server.runtime.listen import bound_port, listen
from tests.unit.server.peer_rig import SERVICES, Recorder, reply


async def main() -> None:
    def accept(stream: PeerStream) -> Recorder:
        return Recorder(lambda message: stream.send(reply(message.hello.registration)))

    peers = GrpcPeerServer(SERVICES)
    peers.on_stream("Push", accept)
    sock = listen("127.0.0.1:0", flag="peer-address")
    listener = PeerListener(peers, sock, None)
    listener.start()
    print(bound_port(sock), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
