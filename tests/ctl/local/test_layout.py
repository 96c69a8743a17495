"""Which processes `ctl up` starts, and with which flags."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from core.address import parse_address
from ctl.base.flags import parse_settings
from ctl.base.ports import PROXY_HOST
from ctl.local.cluster_options import ClusterOptions
from ctl.local.gpus import assign_devices, count_gpus
from ctl.local.layout import Machine, cluster, threads_per_rank
from ctl.local.process_spec import ProcessSpec
from ctl.local.supervision import Limits
from ctl.local.up import stop_limits

OPTIONS = ClusterOptions(model=Path("/models/tiny"), served_model_name="tiny")
LAPTOP = Machine(num_cores=2)


def specs_of(options: ClusterOptions, machine: Machine = LAPTOP) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in cluster(options, machine, iter(count(9000)))}


def test_the_default_cluster() -> None:
    specs = specs_of(OPTIONS)
    assert list(specs) == ["gateway", "router", "prefill-0", "decode-0"]
    assert specs["gateway"].address == "127.0.0.1:8000"
    assert specs["router"].address == "127.0.0.1:8001"
    assert specs["gateway"].flags["router"] == specs["router"].address
    assert specs["router"].flags["prefill"] == specs["prefill-0"].address
    assert specs["router"].flags["decode"] == specs["decode-0"].address
    assert specs["prefill-0"].flags["ranks"] == "1"
    assert specs["decode-0"].flags["ranks"] == "2"
    assert specs["decode-0"].argv()[1:3] == ["-m", "decode_worker"]
    assert specs["decode-0"].flags["model"] == specs["gateway"].flags["model"] == "/models/tiny"


def test_what_is_for_one_role_and_what_is_for_all() -> None:
    specs = specs_of(replace(OPTIONS, gateway_workers=3, otlp_endpoint="traces:4317"))
    assert [spec.flags.get("workers") for spec in specs.values()] == ["3", None, None, None]
    assert {spec.flags["otlp-endpoint"] for spec in specs.values()} == {"traces:4317"}
    assert not any("otlp-endpoint" in spec.flags for spec in specs_of(OPTIONS).values())


def test_no_two_processes_share_a_port() -> None:
    specs = specs_of(replace(OPTIONS, prefill_workers=3, decode_workers=4))
    ports = [spec.address for spec in specs.values()]
    ports += [spec.metrics_address for spec in specs.values() if spec.role != "gateway"]
    assert len(ports) == 2 * 9 - 1
    assert len(set(ports)) == len(ports)


def test_metrics_ports_are_passed_on() -> None:
    for spec in specs_of(OPTIONS).values():
        if spec.role != "gateway":
            assert spec.metrics_address == f"127.0.0.1:{spec.flags['metrics-port']}"


def test_all_workers_are_told_to_the_router_in_order() -> None:
    specs = specs_of(replace(OPTIONS, prefill_workers=2, decode_workers=2))
    addresses = [specs[f"decode-{index}"].address for index in range(2)]
    assert specs["router"].flags["decode"] == ",".join(addresses)


def test_several_routers_know_all_workers_and_gateways_all_routers() -> None:
    specs = specs_of(replace(OPTIONS, routers=2))
    assert list(specs)[:3] == ["gateway", "router-0", "router-1"]
    addresses = [specs[f"router-{index}"].address for index in range(2)]
    assert specs["gateway"].flags["router"] == ",".join(addresses)
    assert addresses[0] == "127.0.0.1:8001"
    for index in range(2):
        assert specs[f"router-{index}"].flags["decode"] == specs["decode-0"].address


def test_with_proxies_others_reach_a_process_by_its() -> None:
    specs = specs_of(replace(OPTIONS, routers=2, decode_workers=2, proxies=True))
    for name, role in (("router-1", "decode"), ("gateway", "router")):
        behind = [f"127.0.0.1:{parse_address(each).port}" for each in reached(specs, name, role)]
        assert behind == [spec.address for spec in specs.values() if spec.role == role]
        assert {parse_address(each).host for each in reached(specs, name, role)} == {PROXY_HOST}
    for spec in specs.values():
        assert spec.address.startswith("127.0.0.1:")
        assert (spec.flags.get("advertise") == PROXY_HOST) == bool(spec.num_ranks)


def reached(specs: dict[str, ProcessSpec], name: str, role: str) -> list[str]:
    """Addresses that a process has been told of a role."""
    return specs[name].flags[role].split(",")


@pytest.mark.parametrize(
    ("num_cores", "prefill_ranks", "decode_ranks", "prefill_threads", "decode_threads"),
    [(2, 1, 2, 2, 1), (3, 1, 2, 3, 1), (12, 1, 4, 12, 3), (1, 2, 4, 1, 1), (64, 2, 1, 32, 64)],
)
def test_ranks_of_a_role_never_need_more_cores_than_there_are(
    num_cores: int, prefill_ranks: int, decode_ranks: int, prefill_threads: int, decode_threads: int
) -> None:
    options = replace(OPTIONS, prefill_ranks=prefill_ranks, decode_ranks=decode_ranks)
    machine = Machine(num_cores=num_cores)
    assert threads_per_rank(options, machine, "prefill") == prefill_threads
    assert threads_per_rank(options, machine, "decode") == decode_threads


def test_all_workers_of_a_role_share_the_cores() -> None:
    specs = specs_of(replace(OPTIONS, prefill_workers=2, prefill_ranks=2), Machine(num_cores=8))
    assert specs["prefill-1"].flags["threads"] == "2"


def test_threads_may_be_given() -> None:
    specs = specs_of(replace(OPTIONS, threads=7))
    assert specs["prefill-0"].flags["threads"] == specs["decode-0"].flags["threads"] == "7"


def test_choices_left_open_are_not_passed() -> None:
    flags = specs_of(OPTIONS)["decode-0"].flags
    assert not {"kv-pages", "chunk-tokens", "max-model-len", "max-running"} & set(flags)
    flags = specs_of(replace(OPTIONS, kv_pages=9, chunk_tokens=128))["prefill-0"].flags
    assert (flags["kv-pages"], flags["chunk-tokens"]) == ("9", "128")


def test_switches_are_set_as_words() -> None:
    flags = ["decode.overlap_schedule=true", "decode.cuda-graph=false"]
    argv = specs_of(replace(OPTIONS, settings=flags))["decode-0"].argv()
    assert "--overlap-schedule" in argv
    assert "--no-cuda-graph" in argv
    assert not {"true", "false", "--no-overlap-schedule", "--cuda-graph"} & {*argv}


def test_settings_reach_their_role_only_and_win() -> None:
    settings = ["decode.kv_pages=5", "router.max-waiting=3", "decode.a=b=c"]
    specs = specs_of(replace(OPTIONS, kv_pages=9, settings=settings))
    assert specs["decode-0"].flags["kv-pages"] == "5"
    assert specs["decode-0"].flags["a"] == "b=c"
    assert specs["prefill-0"].flags["kv-pages"] == "9"
    assert specs["router"].flags["max-waiting"] == "3"
    assert "max-waiting" not in specs["decode-0"].flags


def test_graces_may_be_given() -> None:
    """A stop waits for them."""
    assert stop_limits([*specs_of(OPTIONS).values()]) == Limits(
        front_seconds=33.5, kill_after_seconds=3.5
    )
    settings = ["gateway.grace-seconds=90", "decode.stop_grace_seconds=20"]
    specs = specs_of(replace(OPTIONS, settings=settings))
    assert specs["gateway"].flags["grace-seconds"] == "90"
    assert stop_limits([*specs.values()]) == Limits(front_seconds=93.5, kill_after_seconds=20.5)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("0", 0), ("1.5", 1.5), ("inf", 3600), ("nan", 0), ("-1", 0), ("soon", 0)],
)
def test_graces_that_the_gateway_may_refuse(given: str, seconds: float) -> None:
    settings = [f"gateway.grace-seconds={given}"]
    assert specs_of(replace(OPTIONS, settings=settings))["gateway"].grace_seconds == seconds


@pytest.mark.parametrize("text", ["", "decode", "decode.x", "worker.x=1", "decode.=1", ".x=1"])
def test_a_setting_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ROLE\.FLAG=VALUE"):
        parse_settings([text])


def test_what_the_layout_decides_cannot_be_set() -> None:
    with pytest.raises(ValueError, match=r"decode\.listen is decided"):
        specs_of(replace(OPTIONS, settings=["decode.listen=1.2.3.4:5"]))


@pytest.mark.parametrize(
    ("flags", "variable"),
    [(["gateway.guard_all_paths=true"], ""), (["gateway.guard-all-paths=1"], ""), ([], "yes")],
)
def test_a_gateway_that_nobody_could_find_ready(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], variable: str
) -> None:
    monkeypatch.setenv("EPSERVE_GUARD_ALL_PATHS", variable)
    with pytest.raises(ValueError, match=r"gateway\.guard-all-paths: ctl up has no key"):
        specs_of(replace(OPTIONS, settings=flags))


def test_a_flag_goes_before_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPSERVE_GUARD_ALL_PATHS", "true")
    specs = specs_of(replace(OPTIONS, settings=["gateway.guard-all-paths=false"]))
    assert not specs["gateway"].guards_all_paths


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "devices"),
    [
        ([1, 1], 1, ["cuda:0", "cuda:0"]),
        ([1, 1], 2, ["cuda:0", "cuda:1"]),
        ([1, 2], 2, ["cuda:0", "cuda:0"]),
        ([1, 2], 4, ["cuda:0", "cuda:1"]),
        ([1, 1, 2, 2], 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
        ([4, 4], 8, ["cuda:0", "cuda:4"]),
    ],
)
def test_gpus_go_round_robin(num_ranks: list[int], num_gpus: int, devices: list[str]) -> None:
    assert assign_devices(num_ranks, num_gpus) == devices


@pytest.mark.parametrize(
    ("options", "num_gpus", "shares"),
    [
        ({"decode_ranks": 1}, 1, ["0.500", "0.500"]),
        ({"decode_ranks": 1}, 2, [None, None]),
        ({"decode_ranks": 2}, 2, ["0.500", "0.500"]),
        ({"decode_ranks": 2}, 4, [None, None]),
        ({"prefill_workers": 2, "decode_ranks": 2}, 2, ["0.500", "0.500", "0.500"]),
        ({"prefill_workers": 2, "decode_ranks": 1}, 1, ["0.333", "0.333", "0.333"]),
    ],
)
def test_workers_that_share_a_gpu_share_its_memory(
    options: dict[str, Any], num_gpus: int, shares: list[str | None]
) -> None:
    machine = Machine(num_cores=8, num_gpus=num_gpus)
    specs = specs_of(replace(OPTIONS, device="cuda", **options), machine).values()
    told = [spec.flags.get("gpu-memory-share") for spec in specs if spec.num_ranks]
    assert told == shares
    assert not any("gpu-memory-share" in spec.flags for spec in specs_of(OPTIONS).values())


def test_ranks_of_one_worker_never_share_a_gpu() -> None:
    with pytest.raises(ValueError, match="2 ranks needs 2 GPUs, this machine has 1"):
        assign_devices([1, 2], 1)
    with pytest.raises(ValueError, match="this machine has 1"):
        specs_of(replace(OPTIONS, device="cuda"), Machine(num_cores=8, num_gpus=1))


@pytest.mark.parametrize(("visible", "number"), [("", 0), ("-1", 0), ("0", 1), ("3,1", 2)])
def test_visible_gpus_are_counted(visible: str, number: int) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == number


def test_gpus_are_counted_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: X'\necho 'GPU 1: X'\necho '  MIG 1g'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus({}) == 2
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert count_gpus({}) == 0
