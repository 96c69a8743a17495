"""One worker, rank by rank."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from scripts.dashboards.panel import (
    RATE,
    SCOPE,
    Bars,
    Choice,
    Figure,
    Heat,
    Lines,
    Query,
    Section,
    active,
    dashboard,
    quantiles,
    rate,
    select,
    total,
)

ONE = 'instance=~"$instance"'


def worker() -> Dashboard:
    return dashboard(
        "epserve-worker",
        "Worker",
        "One worker: its ranks, requests, pages and steps.",
        [
            Section("Now", _now()),
            Section("Requests", _requests()),
            Section("Steps and pages", _steps()),
            Section("Process", _process()),
        ],
        Choice("instance", "instance", "epserve_worker_requests_total", has_all=False,
               within=SCOPE),
    )  # fmt: skip


def _now() -> list[Figure]:
    return [
        Figure(title="Running", queries=[Query(total("epserve_num_running_requests", "", ONE))]),
        Figure(title="Waiting", queries=[Query(total("epserve_num_waiting_requests", "", ONE))]),
        Figure(title="Transferring",
               queries=[Query(total("epserve_num_transferring_requests", "", ONE))]),
        Figure(title="KV in use", unit="percentunit",
               queries=[Query(f"max({select('epserve_kv_usage_ratio', ONE)})")]),
        Figure(title="Draining", queries=[Query(total("epserve_worker_draining", "", ONE))],
               text="1: it takes nothing new and finishes what it has."),
        Figure(title="Up for", unit="s",
               queries=[Query(f"time() - max({select('process_start_time_seconds', ONE)})")]),
    ]  # fmt: skip


def _requests() -> list[Lines | Heat]:
    return [
        Lines(title="Requests by outcome", unit="reqps", is_stacked=True,
              queries=[Query(active("epserve_worker_requests_total", "outcome", ONE),
                             "{{outcome}}")]),
        Lines(
            title="Requests of each rank",
            queries=[
                Query(select("epserve_num_running_requests", ONE), "rank {{rank}} running"),
                Query(select("epserve_max_running_requests", ONE), "rank {{rank}} may run"),
                Query(select("epserve_num_waiting_requests", ONE), "rank {{rank}} waiting"),
                Query(select("epserve_num_transferring_requests", ONE),
                      "rank {{rank}} transferring"),
            ],
        ),
        Lines(title="Waiting for pages", unit="s",
              queries=quantiles("epserve_worker_queue_time_seconds", ONE)),
        Lines(title="To the first token", unit="s",
              queries=quantiles("epserve_worker_time_to_first_token_seconds", ONE)),
        Lines(title="Whole request", unit="s",
              queries=quantiles("epserve_worker_e2e_request_latency_seconds", ONE)),
        Lines(
            title="Tokens a second",
            queries=[
                Query(rate("epserve_prefill_tokens_total", "source", ONE), "prompt: {{source}}"),
                Query(rate("epserve_generation_tokens_total", "", ONE), "generated"),
            ],
        ),
    ]  # fmt: skip


def _steps() -> list[Lines | Heat]:
    accepted, first = f'outcome="accepted",{ONE}', f'position="1",{ONE}'
    drafts = "epserve_draft_tokens_total"
    return [
        Heat.of("Steps", "epserve_step_seconds", ONE),
        Heat.of("Requests in a step", "epserve_batch_size", ONE, unit="short"),
        Lines(title="Busy", unit="percentunit",
              queries=[Query(
                  f"sum(rate({select('epserve_step_seconds_sum', ONE)}[{RATE}]))"
                  f" / count({select('epserve_num_running_requests', ONE)})", "in steps")],
              text="Share of time that its ranks spend in steps."),
        Lines(title="Waiting between steps", unit="percentunit",
              queries=[Query(f"sum(rate({select('epserve_step_gap_seconds_total', ONE)}[{RATE}]))"
                             f" / count({select('epserve_num_running_requests', ONE)})", "gaps")],
              text="Share of time in which devices had work and nothing to do."),
        Lines(title="Since the last step", unit="s",
              queries=[Query(select("epserve_rank_quiet_seconds", ONE), "rank {{rank}}")],
              text="Or since the rank last said that it is idle, once a second: above a few "
                   "seconds it is stuck."),
        Lines(title="Stalled and slow",
              queries=[
                  Query(total("epserve_worker_stalled", "", ONE), "stalled"),
                  Query(total("epserve_worker_slow", "", ONE), "slow"),
                  Query(f"sum(increase({select('epserve_worker_stalls_total', ONE)}[{RATE}]))",
                        "stalls begun"),
              ],
              text="Stalled: a rank ends no step, and requests have moved. Slow: steps take a "
                   "multiple of their usual time."),
        Lines(title="Drafts accepted", unit="percentunit", most=1,
              queries=[Query(f"{rate(drafts, 'position', accepted)}"
                             f" / {rate(drafts, 'position', ONE)}", "position {{position}}")],
              text="Of those that were verified, by how far they are ahead."),
        Lines(title="Tokens of a request in a step",
              queries=[Query(f"1 + {rate(drafts, '', accepted)}"
                             f" / {rate(drafts, '', first)}", "tokens")],
              text="Of requests that draft: the acceptance length."),
        Lines(title="Pages", is_stacked=True,
              queries=[Query(total("epserve_kv_pages", "state", ONE), "{{state}}")]),
        Lines(title="Pages in use, by rank", unit="percentunit", most=1,
              queries=[Query(select("epserve_kv_usage_ratio", ONE), "rank {{rank}}")]),
        Lines(title="KV a second", unit="Bps",
              queries=[Query(rate("epserve_kv_transfer_bytes_total", "", ONE), "KV")]),
    ]  # fmt: skip


def _process() -> list[Lines | Bars]:
    return [
        Bars(title="Phases of its start", unit="s",
             queries=[Query(f"max by (phase) ({select('epserve_start_seconds', ONE)})",
                            "{{phase}}")]),
        Bars(title="Memory of a device", unit="bytes",
             text="Of the rank that has most, as it turned out once loaded.",
             queries=[Query("max by (term) (" + select("epserve_memory_bytes",
                            ONE + ',state="used"') + ")", "{{term}}")]),
        Lines(
            title="CPU", text="Cores in use.",
            queries=[
                Query(rate("epserve_rank_cpu_seconds_total", "rank", ONE), "rank {{rank}}"),
                Query(rate("process_cpu_seconds_total", "", ONE), "front"),
            ],
        ),
        Lines(
            title="Memory", unit="bytes",
            queries=[
                Query(select("epserve_rank_memory_bytes", ONE), "rank {{rank}}"),
                Query(select("process_resident_memory_bytes", ONE), "front"),
            ],
        ),
    ]  # fmt: skip
