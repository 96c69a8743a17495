"""The whole cluster at a glance."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from scripts.dashboards.panel import (
    Figure,
    Lines,
    Query,
    Section,
    active,
    dashboard,
    quantile,
    quantiles,
    rate,
    select,
    total,
)

CLIENT_OUTCOMES = (
    "ok|disconnected|slow_reader|invalid_value|context_length_exceeded|model_not_found"
)
LOST = 'state="lost"'
FAILED = f'outcome!~"{CLIENT_OUTCOMES}|overloaded|rate_limit_exceeded"'


def cluster() -> Dashboard:
    return dashboard(
        "epserve-cluster",
        "Cluster",
        "What clients get, how full the cluster is, and who is up.",
        [
            Section("Now", _now()),
            Section("What clients get", _clients()),
            Section("How full it is", _load()),
            Section("Who is up", _processes()),
            Section("Who is stuck", _stalls()),
        ],
    )


def _now() -> list[Figure]:
    failed = rate("epserve_requests_total", "", FAILED)
    ready = 'state="ready"'
    return [
        Figure(title="Requests a second", queries=[Query(rate("epserve_requests_total"))],
               unit="reqps"),
        Figure(
            title="Failed by us",
            queries=[Query(f"({failed} or vector(0)) / {rate('epserve_requests_total')}")],
            unit="percentunit",
            text="Share of requests that ended with an error which is not the client's.",
        ),
        Figure(title="Tokens a second",
               queries=[Query(rate("epserve_gateway_generation_tokens_total"))]),
        Figure(title="First token, p95", unit="s",
               queries=[Query(quantile(0.95, "epserve_time_to_first_token_seconds"))]),
        Figure(title="Between tokens, p95", unit="s",
               queries=[Query(quantile(0.95, "epserve_inter_token_latency_seconds"))]),
        Figure(
            title="Workers ready",
            queries=[
                Query(f"max by (role) ({select('epserve_router_workers', ready)})", "{{role}}")
            ],
        ),
    ]  # fmt: skip


def _clients() -> list[Lines]:
    return [
        Lines(title="Requests by outcome", unit="reqps", is_stacked=True,
              queries=[Query(active("epserve_requests_total", "outcome"), "{{outcome}}")]),
        Lines(title="HTTP responses by status", unit="reqps", is_stacked=True,
              queries=[Query(active("epserve_gateway_http_responses_total", "code"), "{{code}}")]),
        Lines(
            title="Tokens a second",
            queries=[
                Query(rate("epserve_gateway_prompt_tokens_total"), "prompt"),
                Query(rate("epserve_gateway_cached_tokens_total"), "of it cached"),
                Query(rate("epserve_gateway_generation_tokens_total"), "generated"),
            ],
        ),
        Lines(title="Time to first token", unit="s",
              queries=quantiles("epserve_time_to_first_token_seconds")),
        Lines(title="Time between tokens", unit="s",
              queries=quantiles("epserve_inter_token_latency_seconds")),
        Lines(title="Whole request", unit="s",
              queries=quantiles("epserve_e2e_request_latency_seconds")),
    ]  # fmt: skip


def _load() -> list[Lines]:
    return [
        Lines(
            title="Requests in the cluster",
            queries=[
                Query(total("epserve_gateway_num_running_requests"), "running"),
                Query(total("epserve_gateway_num_waiting_requests"), "waiting in the gateway"),
                Query(total("epserve_router_num_waiting_requests"), "waiting for workers"),
            ],
        ),
        Lines(
            title="KV pages in use", unit="percentunit", most=1,
            queries=[Query(
                f"max by (role, instance) ({select('epserve_kv_usage_ratio')})",
                "{{role}} {{instance}}",
            )],
            text="The fullest rank of each worker.",
        ),
        Lines(
            title="Moves and preemptions",
            queries=[
                Query(active("epserve_gateway_moves_total", "reason"), "moved: {{reason}}"),
                Query(rate("epserve_preemptions_total"), "preempted"),
            ],
            text="A choice moves when a worker fails it or hands it over; a request is preempted "
                 "when its rank runs out of pages.",
        ),
    ]  # fmt: skip


def _processes() -> list[Lines]:
    by_role = "max by (role, state) "
    return [
        Lines(
            title="Workers by state",
            queries=[
                Query(f"{by_role}({select('epserve_router_workers')}) > 0", "{{role}} {{state}}"),
                Query(f"max({select('epserve_router_rejected_workers')})", "rejected"),
            ],
        ),
        Lines(
            title="CPU", text="Cores in use.",
            queries=[
                Query(rate("process_cpu_seconds_total", "instance"), "{{instance}}"),
                Query(rate("epserve_rank_cpu_seconds_total", "instance"), "{{instance}}: ranks"),
            ],
        ),
        Lines(
            title="Memory", unit="bytes",
            queries=[
                Query(total("process_resident_memory_bytes", "instance"), "{{instance}}"),
                Query(total("epserve_rank_memory_bytes", "instance"), "{{instance}}: ranks"),
            ],
        ),
    ]  # fmt: skip


def _stalls() -> list[Lines]:
    quiet, lost = select("epserve_rank_quiet_seconds"), select("epserve_router_workers", LOST)
    longest = "max by (role, instance, rank)"
    return [
        Lines(
            title="Since a rank's last step", unit="s",
            queries=[
                Query(f"topk(10, {longest} ({quiet}))", "{{role}} {{instance}}: rank {{rank}}")
            ],
            text="The ten that ended a step, or said that they are idle, longest ago.",
        ),
        Lines(
            title="Longest steps", unit="s",
            queries=[Query(quantile(0.99, "epserve_step_seconds", by="role"), "{{role}} p99")],
            text="What is to be expected of a rank that is well.",
        ),
        Lines(
            title="Workers lost",
            queries=[Query(f"max by (role) ({lost})", "{{role}}")],
            text="Of which the router hears nothing.",
        ),
    ]  # fmt: skip
