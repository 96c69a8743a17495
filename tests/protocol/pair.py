"""A decode and a prefill worker; requests come to decode without a gateway, and end with what it
says."""

import asyncio
from contextlib import aclosing

from core.errors import EpserveError
from core.token_ids import pack_ids
from proto import generate_pb2, router_pb2
from tests.protocol.network import Context
from tests.protocol.workers import MODEL
from tests.protocol.world import Bounds, Client, World

# What a gateway may carry on from elsewhere.
MOVABLE = {"UNAVAILABLE", "FAILED_PRECONDITION"}


class Pair(World):
    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._decode = self.workers["decode:1"]

    def _can_begin(self) -> bool:
        return self._decode.can_run

    def _begin(self) -> None:
        number = len(self.clients)
        client = self._new_client()
        prefill = self.workers["prefill:1"]
        request = generate_pb2.GenerateRequest(
            request_id=f"r{number}",
            model=MODEL,
            prompt_token_ids=pack_ids(client.prompt),
            sampling=generate_pb2.SamplingParams(max_tokens=client.max_tokens),
            prefill=router_pb2.WorkerRef(address=prefill.address, epoch=prefill.epoch),
            decode_epoch=self._decode.epoch,
        )
        loop = self._decode.loop
        task = loop.create_task(self._read(client, request))
        client.leave = lambda: (task.cancel(), loop.run_ready())
        loop.run_ready()

    async def _read(self, client: Client, request: generate_pb2.GenerateRequest) -> None:
        try:
            async with aclosing(self._decode.service.Generate(request, Context())) as stream:
                async for response in stream:
                    client.take([token.token_id for token in response.tokens])
            client.end("ok")
        except EpserveError as error:
            client.end(error.status.grpc)
        except asyncio.CancelledError:
            client.end("left")

    def _check_clients(self) -> None:
        if not self._decode.is_alive:
            return
        told = {client.name: client.outcome for client in self.clients}
        assert all(told.values()), f"somebody waits for ever: {told}"
        good = {"ok", "left", *MOVABLE} if self.spent or self.gone else {"ok"}
        assert set(told.values()) <= good, f"{told}"
