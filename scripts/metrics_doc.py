"""docs/metrics.md, made from the registries of all processes.

python scripts/metrics_doc.py           # writes the page
python scripts/metrics_doc.py --check   # fails when the page is not what it would write
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import configuration_doc  # noqa: E402 - needs the path above
from scripts.metric_families import FOREIGN_PREFIX, Family, families  # noqa: E402
from scripts.metric_peers import PEERS  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"

HEADER = """# Metrics

Made by `make docs` from the code; do not edit.

Every process serves Prometheus metrics over HTTP at `/metrics` of its `--metrics-port`; the
gateway also at `/metrics` of its API port (with `--workers`, the sum over its processes). Units
are seconds, bytes, tokens, and ratios from 0 to 1. What a client sees has no process in its name
and comes from the gateway; the same seen by one process has: `epserve_gateway_`,
`epserve_router_`, `epserve_worker_`. Everything of a worker has the label `role`: `prefill` or
`decode`. A metric that one role alone can move is not there in the other. No label takes more
values than there are ranks, layers, error codes or paths of the API.

A histogram `x` is the series `x_bucket`, `x_sum` and `x_count`. The last column has the names of
SGLang (`sglang:`), vLLM (`vllm:`) and NVIDIA Dynamo (`dynamo_`) for the same thing, where there
are any.

For the endpoint picker of the Gateway API inference extension: queued requests are
`epserve_gateway_num_waiting_requests`, running ones `epserve_gateway_num_running_requests`, KV
utilisation `epserve_gateway_kv_usage_ratio`, all without labels; a gateway is one
for a whole cluster.

The dashboards of the Helm chart draw these metrics, its alerts ([runbook](runbook.md)) watch them.
"""

SECTIONS = (
    ("Gateway", "gateway"),
    ("Router", "router"),
    ("Workers", "decode"),
)
FOREIGN = """
## Every process

`epserve_build_info` is always 1; its labels are the process's `role` (gateway, router, prefill,
decode) and its `version`. From the Prometheus client library, those of workers with their role:
{names}.
"""
COMMON = "epserve_build_info"


def page() -> str:
    """The whole of docs/metrics.md."""
    found = families()
    unknown = PEERS.keys() - {family.name for family in found}
    assert not unknown, f"metric_peers names metrics that do not exist: {sorted(unknown)}"
    parts = [HEADER]
    told: set[str] = set()
    for title, process in SECTIONS:
        processes = {"prefill", "decode"} if process == "decode" else {process}
        section = [
            family
            for family in found
            if processes & set(family.processes)
            and not family.name.startswith((FOREIGN_PREFIX, COMMON))
            and family.name not in told
        ]
        told |= {family.name for family in section}
        parts += [f"{chr(35) * 2} {title}\n", *_table(section), ""]
    foreign = [f"`{one.name}`" for one in found if one.name.startswith(FOREIGN_PREFIX)]
    return "\n".join(parts) + FOREIGN.format(names=", ".join(foreign))


def _table(section: list[Family]) -> Iterator[str]:
    yield "| metric | type | labels | meaning | elsewhere |"
    yield "|---|---|---|---|---|"
    for family in section:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        peers = ", ".join(f"`{name}`" for name in PEERS.get(family.name, ()))
        only = family.processes if len(family.processes) == 1 else ()
        role = f" ({only[0]} only)" if only and only[0] in ("prefill", "decode") else ""
        cells = (f"`{family.name}`", family.kind, labels, family.text + role, peers)
        yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(configuration_doc.main(sys.argv[1:], PAGE, page()))
