"""The histogram that sorts late, against the library's own."""

import random
import threading

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from gateway.base.batched_histogram import MAX_WAITING, BatchedHistogram

BUCKETS = (0.0, 0.001, 0.5, 1.0, 20.0)
SPECIAL = (*BUCKETS, -1.0, 1e-9, 20.000001, 1e9)


def test_it_tells_what_the_librarys_own_does() -> None:
    source = random.Random()
    registries = CollectorRegistry(), CollectorRegistry()
    late = BatchedHistogram("a", "b", buckets=BUCKETS, registry=registries[0])
    plain = Histogram("a", "b", buckets=BUCKETS, registry=registries[1])
    for _ in range(20):
        for _ in range(source.randint(0, 3 * MAX_WAITING)):
            amount = source.choice((*SPECIAL, source.expovariate(1)))
            late.observe(amount)
            plain.observe(amount)
        told, expected = map(generate_latest, registries)
        assert _without_sum(told) == _without_sum(expected)
        assert abs(_sum(told) - _sum(expected)) < 1e-6 * max(1, _sum(expected))


def test_each_number_lies_in_the_bucket_that_the_library_has_for_it() -> None:
    for amount in SPECIAL:
        registries = CollectorRegistry(), CollectorRegistry()
        BatchedHistogram("a", "b", buckets=BUCKETS, registry=registries[0]).observe(amount)
        Histogram("a", "b", buckets=BUCKETS, registry=registries[1]).observe(amount)
        assert generate_latest(registries[0]) == generate_latest(registries[1])


def test_nothing_is_lost_or_counted_twice_while_others_look() -> None:
    registry = CollectorRegistry()
    late = BatchedHistogram("a", "b", buckets=BUCKETS, registry=registry)
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            generate_latest(registry)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20_000):
        late.observe(0.25)
    is_over.set()
    for thread in threads:
        thread.join()
    assert registry.get_sample_value("a_count") == 20_000
    assert registry.get_sample_value("a_sum") == 5000


def _sum(told: bytes) -> float:
    return float(next(line for line in told.splitlines() if line.startswith(b"a_sum")).split()[1])


def _without_sum(told: bytes) -> list[bytes]:
    return [line for line in told.splitlines() if not line.startswith(b"a_sum")]
