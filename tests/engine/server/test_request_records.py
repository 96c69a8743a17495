"""What a worker remembers of its requests."""

import time
from random import randbytes

import psutil

from core.log import request_context
from core.request_ids import call_id, choice_id
from engine.link.messages import Prefilled, TokenOut
from engine.server.request_records import LegRecord, RequestRecords
from proto.generate_pb2 import GenerateRequest
from proto.router_pb2 import WorkerRef
from proto.worker_pb2 import ProcessIdentity


def leg(leg_id: str, accepted_at: float = 0.0) -> LegRecord:
    return LegRecord(
        leg_id=leg_id, accepted_at=accepted_at, rank=1, num_prompt_tokens=9, num_earlier_tokens=0
    )


def prefilled(**figures: int) -> Prefilled:
    return Prefilled(
        request_id="r",
        attempt_id="a",
        token=TokenOut(token_id=1),
        num_cached_tokens=figures["cached"],
        num_computed_tokens=figures["computed"],
        kv_bytes=figures["kv_bytes"],
        queue_seconds=0.5,
        compute_seconds=0.25,
        transfer_seconds=0.125,
    )


def test_open_legs_are_found_and_those_that_are_over() -> None:
    records = RequestRecords()
    moved = records.begin(leg(call_id(choice_id("r", 0), 1), accepted_at=2.0))
    first = records.begin(leg(choice_id("r", 0), accepted_at=1.0))
    records.begin(leg(choice_id("r2", 0)))
    records.end(first, "UNAVAILABLE", 0.75)
    assert records.find("r") == records.find("r-0") == [first, moved]
    assert records.find("r-0.1") == [moved]
    assert records.find("r-1") == []
    message = first.message(ProcessIdentity(name="w"))
    assert (message.finish, message.total_seconds) == ("UNAVAILABLE", 0.75)
    assert moved.message(ProcessIdentity()).finish == ""


def test_a_client_finds_all_under_its_own_id() -> None:
    records = RequestRecords()
    with request_context("mine"):
        mine = records.begin(leg("chatcmpl-1-0"))
    records.begin(leg("chatcmpl-2-0"))
    assert records.find("mine") == [mine]
    assert records.find("min") == []


def test_equal_ids_are_kept_apart() -> None:
    records = RequestRecords()
    earlier, later = records.begin(leg("r")), records.begin(leg("r", 1.0))
    records.end(earlier, "CANCELLED", 1.0)
    assert [one.finish for one in records.find("r")] == ["CANCELLED", ""]
    assert later.finish == ""


def test_the_oldest_are_forgotten_but_never_open_ones() -> None:
    records = RequestRecords(num_kept=2)
    still_open = records.begin(leg("open"))
    for number in range(3):
        records.end(records.begin(leg(f"r{number}")), "stop", 1.0)
    assert records.find("r0") == []
    assert [len(records.find(name)) for name in ("r1", "r2", "open")] == [1, 1, 1]
    assert records.find("open") == [still_open]


def test_a_preempted_request_counts_its_prompt_once_and_its_kv_twice() -> None:
    one = leg("r")
    one.peer = WorkerRef(name="p", address="h:1", epoch="e")
    one.num_attempts = 1
    one.note_prefill(prefilled(cached=4, computed=5, kv_bytes=100))
    one.num_produced = 3
    one.num_attempts = 2
    one.note_prefill(prefilled(cached=8, computed=4, kv_bytes=110))
    one.num_produced += 2
    message = one.message(ProcessIdentity(name="w"))
    assert (message.num_cached_tokens, message.num_computed_tokens) == (4, 5)
    assert message.kv_bytes == 210
    assert (message.compute_seconds, message.transfer_seconds) == (0.5, 0.25)
    assert (message.num_attempts, message.num_preemptions) == (2, 1)
    assert message.num_steps == 3  # two of the five tokens came from prefill
    assert (message.peer.name, message.worker.name) == ("p", "w")


def test_records_do_not_keep_requests() -> None:
    records = RequestRecords()
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(100):
        request = GenerateRequest(prompt_token_ids=randbytes(2**20))
        request.prefill.address = "10.0.0.1:9000"
        record = records.begin(LegRecord(leg_id="a", rank=0, num_prompt_tokens=1,
                                         num_earlier_tokens=0, peer=request.prefill))  # fmt: skip
        records.end(record, "stop", 1.0)
    assert record.peer == request.prefill
    assert process.memory_info().rss - before < 20 * 2**20  # of 100 MB


def test_recording_costs_little() -> None:
    records = RequestRecords()
    number, began = 2000, time.process_time()
    for index in range(number):
        one = records.begin(leg(f"chatcmpl-{index}-0"))
        one.num_attempts = 1
        records.end(one, "stop", 1.0)
    assert (time.process_time() - began) / number < 200e-6  # some 3 us where nothing else runs
