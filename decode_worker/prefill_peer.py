"""Connections to prefill workers: one channel an address, watched for its loss."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import grpc

from decode_worker.liveness import Liveness
from proto import generate_pb2_grpc
from rpc.client import channel

# Idle channels beyond this many are closed, the least recently used first.
MAX_IDLE_PEERS = 64

OnLost = Callable[["PrefillPeer"], None]


class PrefillPeer:
    """One address. `num_losses` grows each time an established connection breaks: the process
    there is gone, or is about to be taken for gone. `gone_epochs` are those it may have
    been; they are forgotten when the address answers again, whoever it is then."""

    def __init__(self, address: str, on_lost: OnLost) -> None:
        self.address = address
        self.num_losses = 0
        self.num_users = 0
        self.gone_epochs: set[str] = set()
        self._liveness = Liveness(address)
        self._channel = channel(address)
        self.stub = generate_pb2_grpc.PrefillStub(self._channel)
        self._on_lost = on_lost
        self._watch = asyncio.create_task(self._watch_state(), name=f"watch-{address}")

    @property
    def connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def is_there(self) -> bool:
        """Whether there is a process at the address at all; it may be frozen, and go on."""
        return await self._liveness.is_there()

    async def close(self) -> None:
        self._liveness.close()
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._channel.close(None)

    async def _watch_state(self) -> None:
        state = self._channel.get_state()
        while state is not grpc.ChannelConnectivity.SHUTDOWN:
            await self._channel.wait_for_state_change(state)
            # Tried again at once after a loss, so that a restarted worker is found by itself.
            before, state = state, self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                self.gone_epochs.clear()
            elif before is grpc.ChannelConnectivity.READY:
                self.num_losses += 1
                self._on_lost(self)


class PrefillPeers:
    """All of them. `borrow` and `give_back` bracket each use of a peer."""

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._peers: OrderedDict[str, PrefillPeer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def find(self, address: str) -> PrefillPeer | None:
        """The peer at an address that was borrowed before."""
        return self._peers.get(address)

    def borrow(self, address: str) -> PrefillPeer:
        """Raises ValueError when `address` is not host:port."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = PrefillPeer(address, self._on_lost)
        self._peers.move_to_end(address)
        peer.num_users += 1
        return peer

    def give_back(self, peer: PrefillPeer) -> None:
        peer.num_users -= 1
        idle = [address for address, peer in self._peers.items() if peer.num_users == 0]
        for address in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            task = asyncio.create_task(self._peers.pop(address).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all channels; calls in progress on them fail."""
        peers = list(self._peers.values())
        self._peers.clear()
        closing = [*(peer.close() for peer in peers), *self._closing]
        await asyncio.gather(*closing, return_exceptions=True)
