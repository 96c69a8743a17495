"""For each alert: series that raise it, and series that are nearly as bad and must not.

A value is in promtool's notation at one sample a minute: "0+6x20" is 0, 6, 12, ... 120.
"""

from dataclasses import dataclass, field

Series = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The alert is raised with `labels` at `at` and not a minute before `since`."""

    alert: str
    fires: Series
    quiet: Series
    at: str
    labels: dict[str, str] = field(default_factory=dict)
    since: str = ""


def steady(value: float) -> str:
    return f"{value:g}x60"


def histogram(name: str, slow_share: float, le: float, **labels: str) -> Series:
    """60 observations a minute, of which `slow_share` lie between `le` and twice of it."""
    text = "".join(f'{key}="{value}",' for key, value in labels.items())
    fast = 60 * (1 - slow_share)
    return {
        f'{name}_bucket{{{text}le="{le / 2:g}"}}': f"0+{fast:g}x60",
        f'{name}_bucket{{{text}le="{le:g}"}}': f"0+{fast:g}x60",
        f'{name}_bucket{{{text}le="{2 * le:g}"}}': "0+60x60",
        f'{name}_bucket{{{text}le="+Inf"}}': "0+60x60",
    }


def workers(role: str, state: str, count: int) -> Series:
    return {f'epserve_router_workers{{role="{role}",state="{state}"}}': steady(count)}


READY_PREFILL = 'epserve_router_workers{role="prefill",state="ready"}'
HELD = 'epserve_router_members{role="decode",standing="held"}'
LWS = "leaderworkerset_sigs_k8s_io_"
PLACE = {f"{LWS}name": "epserve-decode", f"{LWS}group_index": "0", f"{LWS}worker_index": "0"}


def starts(count: int, *, group: str = "0", worker: str = "0") -> Series:
    """A pod at one place of a group, made again every five minutes under another name."""
    place = PLACE | {f"{LWS}group_index": group, f"{LWS}worker_index": worker}
    labels = ",".join(f'{key}="{value}"' for key, value in place.items())
    return {
        f'process_start_time_seconds{{role="decode",instance="{index}:9100",{labels}}}':
            f"_x{5 * index} {index}x3 stale"
        for index in range(1, count + 1)
    }  # fmt: skip


GATEWAY = 'epserve_build_info{role="gateway",version="1"}'
ROUTER = 'epserve_build_info{role="router",version="1"}'
# The absence of all processes is an alert of its own.
UP = {GATEWAY: steady(1), ROUTER: steady(1)}
# Of a second release, which says nothing of the first.
OTHER_GATEWAY = 'epserve_build_info{role="gateway",version="1",app_kubernetes_io_instance="b"}'
OTHER_ROUTER = 'epserve_build_info{role="router",version="1",app_kubernetes_io_instance="b"}'
OTHER = {OTHER_GATEWAY: steady(1), OTHER_ROUTER: steady(1)}
ANSWERED = 'epserve_gateway_http_responses_total{path="/v1/completions",code="200"}'
REFUSED = 'epserve_gateway_http_responses_total{path="/v1/completions",code="429"}'
DECODE = {"instance": "d0", "role": "decode"}

CASES = [
    Case(
        alert="EpserveNoReadyWorkers",
        fires={READY_PREFILL: "1x9 0x60"} | workers("decode", "ready", 1),
        quiet={READY_PREFILL: "1x8 0 1x60"} | workers("decode", "ready", 1),
        at="11m", since="10m", labels={"role": "prefill"},
    ),
    Case(alert="EpserveGatewayAbsent", fires={ROUTER: steady(1), GATEWAY: "1x4 stale"} | OTHER,
         quiet=OTHER, at="7m", since="6m"),
    Case(alert="EpserveRouterAbsent", fires={GATEWAY: steady(1), ROUTER: "1x4 stale"} | OTHER,
         quiet=OTHER, at="7m", since="6m"),
    Case(
        alert="EpserveWorkerLost",
        fires=workers("decode", "lost", 2),
        quiet=workers("decode", "lost", 0),
        at="5m", since="4m", labels={"role": "decode"},
    ),
    Case(
        alert="EpserveWorkerRejected",
        fires={"epserve_router_rejected_workers": steady(1)},
        quiet={"epserve_router_rejected_workers": "1x4 0x60"},
        at="5m", since="4m",
    ),
    Case(
        alert="EpserveWorkerNotReady",
        fires={HELD: "1x180"},
        quiet={HELD: "1x119 0 1x60"},
        at="2h", since="119m", labels={"role": "decode"},
    ),
    Case(
        alert="EpserveProcessRestarts",
        fires=starts(5) | starts(4, group="1"),
        quiet={**starts(4), **starts(4, group="1"), **starts(4, worker="1"),
               'process_start_time_seconds{role="decode",instance="d0"}': "1 2 3 4x60"},
        at="30m", since="20m", labels={**PLACE, "role": "decode"},
    ),
    Case(
        alert="EpserveRankStalled",
        fires={'epserve_rank_quiet_seconds{role="decode",instance="d0",rank="0"}': steady(1),
               'epserve_rank_quiet_seconds{role="decode",instance="d0",rank="1"}': "0x9 7 0x60"},
        quiet={'epserve_rank_quiet_seconds{role="decode",instance="d0",rank="1"}': steady(4.5)},
        at="10m", since="9m", labels=DECODE | {"rank": "1"},
    ),
    Case(
        alert="EpserveDrainTakesLong",
        fires={'epserve_worker_draining{role="decode",instance="d0"}': steady(1)},
        quiet={'epserve_worker_draining{role="decode",instance="d0"}': "1x29 0x60"},
        at="30m", since="29m", labels=DECODE,
    ),
    Case(
        alert="EpserveDiscoveryFails",
        fires={'epserve_router_discovery_failures_total{instance="r0"}': "0+3x60"},
        quiet={'epserve_router_discovery_failures_total{instance="r0"}': "0+1x60"},
        at="15m", labels={"instance": "r0"},
    ),
    Case(
        alert="EpserveRequestsFail",
        fires={'epserve_requests_total{outcome="ok"}': "0+95x60",
               'epserve_requests_total{outcome="unavailable"}': "0+5x60"},
        quiet={'epserve_requests_total{outcome="ok"}': "0+99x60",
               'epserve_requests_total{outcome="unavailable"}': "0+1x60",
               'epserve_requests_total{outcome="invalid_value"}': "0+50x60",
               'epserve_requests_total{outcome="overloaded"}': "0+50x60",
               'epserve_requests_total{outcome="disconnected"}': "0+50x60"},
        at="15m",
    ),
    Case(
        alert="EpserveRequestsRefused",
        fires={ANSWERED: "0+90x60", REFUSED: "0+10x60"},
        quiet={ANSWERED: "0+97x60", REFUSED: "0+3x60"},
        at="20m",
    ),
    Case(
        alert="EpserveSlowFirstToken",
        fires=histogram("epserve_time_to_first_token_seconds", 0.1, 10),
        quiet=histogram("epserve_time_to_first_token_seconds", 0.02, 10),
        at="20m",
    ),
    Case(
        alert="EpserveSlowTokens",
        fires=histogram("epserve_inter_token_latency_seconds", 0.1, 0.2),
        quiet=histogram("epserve_inter_token_latency_seconds", 0.02, 0.2),
        at="20m",
    ),
    Case(
        alert="EpserveLongQueue",
        fires=histogram("epserve_worker_queue_time_seconds", 0.1, 5, role="prefill"),
        quiet=histogram("epserve_worker_queue_time_seconds", 0.02, 5, role="prefill"),
        at="20m", labels={"role": "prefill"},
    ),
    Case(
        alert="EpserveRequestsMove",
        fires={'epserve_gateway_moves_total{reason="unavailable"}': "0+20x60",
               'epserve_requests_total{outcome="ok"}': "0+100x60"},
        quiet={'epserve_gateway_moves_total{reason="draining"}': "0+90x60",
               'epserve_gateway_moves_total{reason="unavailable"}': "0+5x60",
               'epserve_requests_total{outcome="ok"}': "0+100x60"},
        at="25m",
    ),
    Case(
        alert="EpserveKvAlmostFull",
        fires={'epserve_kv_usage_ratio{role="decode",rank="0"}': steady(0.98),
               'epserve_kv_usage_ratio{role="decode",rank="1"}': steady(0.96)},
        quiet={'epserve_kv_usage_ratio{role="decode",rank="0"}': steady(0.98),
               'epserve_kv_usage_ratio{role="decode",rank="1"}': steady(0.5)},
        at="10m", since="9m",
    ),
    Case(
        alert="EpservePreemptions",
        fires={'epserve_preemptions_total{instance="d0"}': "0+12x60"},
        quiet={'epserve_preemptions_total{instance="d0"}': "0+3x60"},
        at="25m", labels={"instance": "d0"},
    ),
    Case(
        alert="EpserveDraftsRejected",
        fires={
            'epserve_draft_tokens_total{position="1",outcome="accepted"}': "0+300x60",
            'epserve_draft_tokens_total{position="1",outcome="rejected"}': "0+900x60",
            'epserve_draft_tokens_total{position="2",outcome="accepted"}': "0+90x60",
        },
        quiet={
            'epserve_draft_tokens_total{position="1",outcome="accepted"}': "0+3x60",
            'epserve_draft_tokens_total{position="1",outcome="rejected"}': "0+9x60",
            'epserve_draft_tokens_total{position="2",outcome="rejected"}': "0+90x60",
        },
        at="40m", since="10m",
    ),
    Case(
        alert="EpserveTransfersFail",
        fires={'epserve_kv_transfer_failures_total{role="prefill",instance="p0"}': "0+1x60"},
        quiet={'epserve_kv_transfer_failures_total{role="prefill",instance="p0"}': "0 0 3x60"},
        at="12m", labels={"role": "prefill", "instance": "p0"},
    ),
    Case(
        alert="EpserveSlowTransfer",
        fires=histogram("epserve_kv_wait_seconds", 0.1, 1),
        quiet=histogram("epserve_kv_wait_seconds", 0.02, 1),
        at="20m",
    ),
    Case(
        alert="EpservePagesQuarantined",
        fires={'epserve_kv_pages{state="quarantined",instance="d0",rank="0"}': steady(7)},
        quiet={'epserve_kv_pages{state="quarantined",instance="d0",rank="0"}':
               "7 7 0 7 7 0 7 7 0 7 7 0 7 7 0"},
        at="10m", labels={"instance": "d0"},
    ),
    Case(
        alert="EpserveExpertsUnbalanced",
        fires={'epserve_expert_balancedness{layer="1",instance="d0",role="decode"}': steady(0.3),
               'epserve_expert_balancedness{layer="2",instance="d0",role="decode"}': steady(0.7)},
        quiet={'epserve_expert_balancedness{layer="1",instance="d0",role="decode"}': steady(0.5),
               'epserve_expert_balancedness{layer="2",instance="d0",role="decode"}': steady(0.9)},
        at="30m", since="29m", labels=DECODE,
    ),
    Case(
        alert="EpserveRebalanceFails",
        fires={'epserve_expert_rebalances_total{outcome="restored",instance="d0",role="decode"}':
               "0 0 1x60"},
        quiet={'epserve_expert_rebalances_total{outcome="done",instance="d0",role="decode"}':
               "0+1x60"},
        at="5m", labels=DECODE,
    ),
]  # fmt: skip
