"""The proof of full length."""

import random

import pytest

from decode_worker.arrival import Arrival
from engine.link.kv_notice import KvNotice


def notice(layer: int, num_layers: int, page: int, num_pages: int) -> KvNotice:
    return KvNotice("a", layer, num_layers, page, num_pages)


def test_complete_means_every_page_of_every_layer() -> None:
    arrival = Arrival(num_layers=3, num_pages=70)
    pieces = [notice(layer, 1, page, 1) for layer in range(3) for page in range(70)]
    random.Random(1).shuffle(pieces)
    for piece in pieces:
        assert not arrival.complete
        arrival.add(piece)
    assert arrival.complete


def test_what_is_announced_twice_counts_once() -> None:
    arrival = Arrival(num_layers=2, num_pages=2)
    for _ in range(4):
        arrival.add(notice(0, 2, 0, 1))
    assert not arrival.complete
    arrival.add(notice(0, 1, 1, 1))
    arrival.add(notice(0, 1, 0, 2))
    assert not arrival.complete
    arrival.add(notice(0, 2, 1, 1))
    assert arrival.complete


@pytest.mark.parametrize(
    "wrong",
    [
        notice(0, 3, 0, 1),
        notice(2, 1, 0, 1),
        notice(0, 1, 4, 1),
        notice(0, 1, 3, 2),
        notice(-1, 1, 0, 1),
        notice(0, 1, -1, 1),
        notice(0, 1, 2, -1),
        notice(0, -1, 0, 1),
    ],
)
def test_pages_that_were_not_reserved_are_refused(wrong: KvNotice) -> None:
    arrival = Arrival(num_layers=2, num_pages=4)
    with pytest.raises(ValueError, match="outside"):
        arrival.add(wrong)
    arrival.add(notice(0, 2, 0, 4))
    assert arrival.complete
