"""What in deploy/helm is made from something else: examples' objects, and the flags in the schema.

python scripts/render_chart.py           # writes them
python scripts/render_chart.py --check   # fails when one is not what it would write
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import helm_python  # noqa: E402 - needs the path above
import yaml  # noqa: E402

from core.settings import ProcessSettings  # noqa: E402
from engine.process.settings import WorkerSettings  # noqa: E402
from gateway.base.settings import GatewaySettings  # noqa: E402
from router.settings import RouterSettings  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "epserve"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
SCHEMA = CHART / "values.schema.json"
RELEASE = "epserve"
NAMESPACE = "serving"
KUBE_VERSION = "v1.32.0"
# What clusters with the operators of the examples know.
API_VERSIONS = ("monitoring.coreos.com/v1",)

# The cluster's token, where the chart makes one.
RANDOM_TOKEN = re.compile(r'(?<=cluster-token: ")\w{48}(?=")')

# Flags that the chart decides, or has values of its own for.
TAKEN = {
    "cluster_token_file", "cluster_tls_cert", "cluster_tls_key", "cluster_tls_ca",
    "cluster_tls_name", "insecure_cluster", "name", "listen", "advertise", "metrics_port",
    "log_level", "log_format", "model", "served_model_name", "otlp_endpoint", "trace_sample_ratio",
}  # fmt: skip
PROCESSES: dict[str, tuple[type[ProcessSettings], set[str]]] = {
    "gatewaySettings": (
        GatewaySettings,
        TAKEN | {
            "router", "grace_seconds", "api_keys", "api_keys_file", "tls_cert", "tls_key",
            "guard_all_paths",
        },
    ),
    "routerSettings": (
        RouterSettings,
        TAKEN | {
            "prefill", "decode", "discovery", "prefill_dns", "decode_dns", "prefill_selector",
            "decode_selector", "worker_port", "kubernetes_namespace", "kubernetes_api",
            "admin_token_file",
        },
    ),
    "workerSettings": (
        WorkerSettings,
        TAKEN | {
            "device", "ranks", "nodes", "node_rank", "rendezvous", "run_dir", "admin_token_file",
            "start_timeout_seconds", "stop_grace_seconds", "expert_group",
        },
    ),
}  # fmt: skip


def render(
    values: dict[str, Any],
    *,
    name: str = "",
    namespace: str = NAMESPACE,
    kube_version: str = KUBE_VERSION,
    api_versions: tuple[str, ...] = API_VERSIONS,
) -> dict[str, str]:
    """Text by template; `name` of the release, "" for the examples'. Raises helm_python's errors
    for values that the chart refuses."""
    joined = values.get("joins", {}).get("release", "")
    name = name or (f"{joined}-next" if joined else RELEASE)
    with helm_python.Chart.load(str(CHART)) as chart:
        options = {
            "name": name, "namespace": namespace, "kube_version": kube_version,
            "api_versions": list(api_versions),
        }  # fmt: skip
        # NOTE: Chart.render knows of the name and the namespace only.
        reply = helm_python._native.call_string(
            "helm_render", chart._raw(), json.dumps(values), json.dumps(options)
        )
        rendered: dict[str, str] = json.loads(reply)
    return rendered


def objects(values: dict[str, Any], **options: Any) -> str:
    """All objects as one text, as `helm template` would print them."""
    parts = []
    for path, text in sorted(render(values, **options).items()):
        if path.endswith(".yaml") and (body := text.strip().removeprefix("---").strip()):
            body = RANDOM_TOKEN.sub("A RANDOM ONE", body)
            parts.append(f"---\n# Source: {path}\n{body}\n")
    return "".join(parts)


def schema() -> str:
    """The schema of the values with the flags of each process as they are now."""
    document = json.loads(SCHEMA.read_text())
    for definition, (settings, taken) in PROCESSES.items():
        document["$defs"][definition] = flags_schema(settings, taken)
    return json.dumps(document, indent=2) + "\n"


def flags_schema(settings: type[ProcessSettings], taken: set[str]) -> dict[str, Any]:
    """Schema of an object that holds flags by name; those in `taken` are refused."""
    fields = settings.model_json_schema(mode="validation")
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name.replace("_", "-"): _flag(field, fields.get("$defs", {}))
            for name, field in fields["properties"].items()
            if name not in taken
        },
    }


def _flag(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """What one flag takes: a text, number or switch with its bounds. Lists are texts."""
    for option in field.get("anyOf", ()):
        if option.get("type") != "null":
            field = field | option
    if "$ref" in field:
        field = field | definitions[field["$ref"].rpartition("/")[2]]
    if field.get("type") == "array":
        return {"type": "string", "description": field["description"]}
    kept = (
        "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "description",
    )  # fmt: skip
    return {key: field[key] for key in kept if key in field}


def products() -> Iterator[tuple[Path, str]]:
    """Every file that is made, with what it should hold."""
    yield SCHEMA, schema()
    for path in sorted(EXAMPLES.glob("values-*.yaml")):
        values = yaml.safe_load(path.read_text())
        output = path.with_name(path.name.replace("values-", "output-", 1))
        yield output, objects(values)


def main(arguments: list[str]) -> int:
    stale = []
    for path, text in products():
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if arguments != ["--check"]:
            path.write_text(text)
    if arguments == ["--check"]:
        for each in stale:
            print(f"{each} is stale: make docs")
        return 1 if stale else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
