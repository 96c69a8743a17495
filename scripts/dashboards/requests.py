"""The way of a request, stage by stage."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from scripts.dashboards.panel import (
    Heat,
    Lines,
    Query,
    Section,
    active,
    dashboard,
    quantile,
    quantiles,
)

PREFILL, DECODE = 'role="prefill"', 'role="decode"'
# In the order in which a request comes through them.
STAGES = (
    ("1 checked and tokenized", "epserve_gateway_prepare_seconds", ()),
    ("2 waits in the gateway", "epserve_gateway_queue_time_seconds", ()),
    ("3 assigned by the router", "epserve_router_assign_seconds", ()),
    ("4 waits for pages (decode)", "epserve_worker_queue_time_seconds", (DECODE,)),
    ("5 waits for prefill", "epserve_worker_queue_time_seconds", (PREFILL,)),
    ("6 prefill, to its first token", "epserve_worker_time_to_first_token_seconds", (PREFILL,)),
    ("7 waits for its last KV page", "epserve_kv_wait_seconds", ()),
)


def requests() -> Dashboard:
    return dashboard(
        "epserve-requests",
        "Request path",
        "Where the time of a request goes, from its arrival at the gateway to its last token.",
        [
            Section(
                "As clients see it",
                [
                    Heat.of("Time to first token", "epserve_time_to_first_token_seconds"),
                    Heat.of("Time between tokens", "epserve_inter_token_latency_seconds"),
                    Heat.of("Whole request", "epserve_e2e_request_latency_seconds"),
                ],
            ),
            Section("Stages", _stages()),
            Section("Sizes", _sizes()),
            Section("Ends", _ends()),
        ],
    )


def _stages() -> list[Lines | Heat]:
    def lines(share: float) -> list[Query]:
        return [Query(quantile(share, name, *which), stage) for stage, name, which in STAGES]

    return [
        Lines(title="Stages before the first token, median", unit="s", queries=lines(0.5),
              text="Stage 6 contains stage 5."),
        Lines(title="Stages before the first token, p95", unit="s", queries=lines(0.95)),
        Lines(title="Waiting at the router, of a choice", unit="s",
              queries=quantiles("epserve_queue_time_seconds")),
        Heat.of("Prefill, to the first token", "epserve_worker_time_to_first_token_seconds",
                PREFILL),
        Heat.of("Decode, to the first token", "epserve_worker_time_to_first_token_seconds", DECODE,
                text="From accepting a request; the wait for prefill and KV is in it."),
        Heat.of("Decode, between tokens", "epserve_worker_inter_token_latency_seconds"),
    ]  # fmt: skip


def _sizes() -> list[Heat]:
    return [
        Heat.of("Prompt tokens", "epserve_request_prompt_tokens", unit="short"),
        Heat.of("Generated tokens", "epserve_request_generation_tokens", unit="short"),
        Heat.of("Time at decode workers", "epserve_worker_e2e_request_latency_seconds", DECODE),
    ]


def _ends() -> list[Lines]:
    return [
        Lines(title="At the gateway", unit="reqps", is_stacked=True,
              queries=[Query(active("epserve_requests_total", "outcome"), "{{outcome}}")]),
        Lines(title="At the router", unit="reqps", is_stacked=True,
              queries=[Query(active("epserve_router_assign_total", "outcome"), "{{outcome}}")]),
        Lines(
            title="At the workers", unit="reqps", is_stacked=True,
            queries=[Query(active("epserve_worker_requests_total", "role, outcome"),
                           "{{role}}: {{outcome}}")],
        ),
    ]  # fmt: skip
