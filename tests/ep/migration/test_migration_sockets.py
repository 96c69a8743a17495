"""Rounds over real sockets: what arrives, how fast, and what ends them."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from core.errors import TransferError
from ep.migration.migration_sockets import SocketCarrier

Pair = Callable[..., tuple[SocketCarrier, SocketCarrier]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    carriers: list[SocketCarrier] = []

    def make(
        bytes_per_second: float = 1e12,
        silence_seconds: float = 30.0,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> tuple[SocketCarrier, SocketCarrier]:
        """Of ranks 0 and 1; the limits are rank 0's."""
        first, second = socket.socketpair()
        carriers.append(
            SocketCarrier(
                {1: first},
                bytes_per_second=bytes_per_second,
                silence_seconds=silence_seconds,
                is_wanted=is_wanted,
            )
        )
        carriers.append(
            SocketCarrier(
                {0: second}, bytes_per_second=1e12, silence_seconds=30, is_wanted=lambda: True
            )
        )
        return carriers[-2], carriers[-1]

    yield make
    for carrier in carriers:
        carrier.close()


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


def test_both_ways_at_once_and_in_order(pair: Pair) -> None:
    """Far more than the sockets hold: who only sends first would wait for ever."""
    first, second = pair()
    there = [random_bytes(size) for size in (1, 3_000_000, 5_000_000)]
    back = [random_bytes(size) for size in (4_000_000, 7)]
    got_there = [torch.empty_like(one) for one in there]
    got_back = [torch.empty_like(one) for one in back]
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):  # two rounds over the same connections
            ended = pool.submit(
                second.carry, [(0, one) for one in back], [(0, one) for one in got_there]
            )
            first.carry([(1, one) for one in there], [(1, one) for one in got_back])
            ended.result(30)
            assert all(map(torch.equal, there, got_there))
            assert all(map(torch.equal, back, got_back))
            for one in (*got_there, *got_back):
                one.zero_()


def test_nothing_to_carry(pair: Pair) -> None:
    first, _ = pair()
    first.carry([], [])


def test_no_faster_than_allowed(pair: Pair) -> None:
    first, second = pair(bytes_per_second=20_000_000)
    sent, got = random_bytes(6_000_000), torch.empty(6_000_000, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(second.carry, [], [(0, got)])
        began = time.monotonic()
        first.carry([(1, sent)], [])
        ended.result(30)
    # What is sent in one go need not wait.
    assert time.monotonic() - began > 0.2
    assert torch.equal(sent, got)


def test_slow_is_not_silent(pair: Pair) -> None:
    first, second = pair(bytes_per_second=400_000, silence_seconds=1.0)
    sent, got = random_bytes(1_300_000), torch.empty(1_300_000, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(second.carry, [], [(0, got)])
        first.carry([(1, sent)], [])
        ended.result(30)
    assert torch.equal(sent, got)


def test_ranks_out_of_step_notice(pair: Pair) -> None:
    first, second = pair()
    second.carry([], [])  # a round that rank 0 knows nothing of
    second.carry([(0, random_bytes(10))], [])
    with pytest.raises(TransferError, match="rank 1 is out of step"):
        first.carry([], [(1, torch.empty(10, dtype=torch.uint8))])


def test_another_size_is_out_of_step(pair: Pair) -> None:
    first, second = pair()
    second.carry([(0, random_bytes(10))], [])
    with pytest.raises(TransferError, match="out of step"):
        first.carry([], [(1, torch.empty(11, dtype=torch.uint8))])


def test_a_peer_that_leaves(pair: Pair) -> None:
    first, second = pair()
    second.close()
    with pytest.raises(TransferError):
        first.carry([], [(1, torch.empty(10, dtype=torch.uint8))])


def test_a_silent_peer_is_given_up(pair: Pair) -> None:
    first, _ = pair(silence_seconds=0.1)
    with pytest.raises(TransferError, match=r"nothing moves for 0\.1 s"):
        first.carry([], [(1, torch.empty(10, dtype=torch.uint8))])


def test_a_round_that_is_not_wanted_any_more(pair: Pair) -> None:
    first, _ = pair(is_wanted=lambda: False)
    with pytest.raises(TransferError, match="given up"):
        first.carry([], [(1, torch.empty(10, dtype=torch.uint8))])
