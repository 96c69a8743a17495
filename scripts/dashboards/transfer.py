"""KV pages: who holds them, how they travel, what is found again."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from scripts.dashboards.panel import (
    RATE,
    Heat,
    Lines,
    Query,
    Section,
    dashboard,
    quantiles,
    rate,
    select,
    total,
)


def transfer() -> Dashboard:
    return dashboard(
        "epserve-kv",
        "KV and transfer",
        "KV pages: who holds them, how they travel from prefill to decode, what is found again.",
        [
            Section("Pages", _pages()),
            Section("Transfer", _transfer()),
            Section("Prefixes", _prefixes()),
        ],
    )


def _pages() -> list[Lines]:
    def by_state(role: str) -> Lines:
        pages = total("epserve_kv_pages", "state", f'role="{role}"')
        return Lines(title=f"Pages of {role} workers", is_stacked=True,
                     queries=[Query(pages, "{{state}}")])  # fmt: skip

    return [
        by_state("prefill"),
        by_state("decode"),
        Lines(
            title="In use, by rank", unit="percentunit", most=1,
            queries=[Query(select("epserve_kv_usage_ratio"), "{{instance}} rank {{rank}}")],
        ),
        Lines(
            title="Requests by stage",
            queries=[
                Query(total("epserve_num_waiting_requests", "role"), "{{role}}: waiting"),
                Query(total("epserve_num_transferring_requests", "role"), "{{role}}: transferring"),
                Query(total("epserve_num_running_requests", "role"), "{{role}}: running"),
            ],
        ),
        Lines(title="Prompt tokens that wait", text="Not computed by anybody yet.",
              queries=[Query(total("epserve_num_waiting_tokens", "role"), "{{role}}")]),
        Lines(title="Preemptions",
              queries=[Query(rate("epserve_preemptions_total", "instance"), "{{instance}}")]),
    ]  # fmt: skip


def _transfer() -> list[Lines | Heat]:
    return [
        Lines(
            title="KV a second", unit="Bps",
            queries=[Query(rate("epserve_kv_transfer_bytes_total", "role, instance"),
                           "{{role}} {{instance}}")],
            text="Sent by prefill workers, received by decode workers.",
        ),
        Heat.of("Sending a request's KV", "epserve_kv_transfer_seconds",
                text="From its first page to the last that has landed; later layers are "
                     "computed meanwhile."),
        Heat.of("Waiting for a request's last page", "epserve_kv_wait_seconds",
                text="After its first token: the part of the transfer that costs time."),
        Lines(title="Waiting for the last page", unit="s",
              queries=quantiles("epserve_kv_wait_seconds")),
        Lines(title="Failed transfers",
              queries=[Query(rate("epserve_kv_transfer_failures_total", "role, instance"),
                             "{{role}} {{instance}}")]),
        Lines(title="Quarantined pages",
              queries=[Query(total("epserve_kv_pages", "instance", 'state="quarantined"'),
                             "{{instance}}")],
              text="Held back until the prefill worker is known to write no more into them."),
    ]  # fmt: skip


def _prefixes() -> list[Lines]:
    def share(name: str, label: str, value: str) -> str:
        found = rate(name, "", f'{label}="{value}"')
        return f"{found} / {rate(name, '', _OF[name])}"

    tokens, pages = "epserve_prefill_tokens_total", "epserve_router_prefix_pages_total"
    return [
        Lines(title="Prompt tokens at prefill workers", is_stacked=True,
              queries=[Query(f"sum by (source) (rate({select(tokens, _OF[tokens])}[{RATE}]))",
                             "{{source}}")]),
        Lines(
            title="Found again", unit="percentunit", most=1,
            queries=[
                Query(share(tokens, "source", "cached"), "tokens at prefill workers"),
                Query(share(pages, "result", "matched"), "full pages, as the router expected"),
            ],
        ),
        Lines(title="Cached pages",
              queries=[Query(total("epserve_kv_pages", "instance", 'state="cached"'),
                             "{{instance}}")],
              text="Prefixes that nobody uses now; taken when pages run out."),
    ]  # fmt: skip


_OF = {
    "epserve_prefill_tokens_total": 'role="prefill"',
    "epserve_router_prefix_pages_total": 'result=~"matched|missed"',
}
