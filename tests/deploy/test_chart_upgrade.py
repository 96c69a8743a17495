"""How workers are replaced: with another group beside those there are, or another release."""

from typing import Any

import pytest

from tests.deploy.chart import EXAMPLES, Object, load, overlaid, pod_templates, render

BASE = EXAMPLES / "values-two-nodes-16-gpu.yaml"
NEXT = EXAMPLES / "values-next-version.yaml"
ROLES = ("prefill", "decode")


def rollouts(values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(surge, unavailable) by role."""
    found = {}
    for pod in pod_templates(render(values)):
        if pod.component not in ROLES:
            continue
        spec = pod.owner["spec"]
        for role in spec.get("roles", ()):
            spec = role["spec"] if role["name"] == pod.component else spec
        told = spec["strategy"] if "strategy" in spec else spec["rolloutStrategy"]
        bounds = told.get("rollingUpdate") or told["rollingUpdateConfiguration"]
        found[pod.component] = (bounds["maxSurge"], bounds["maxUnavailable"])
    return found


@pytest.mark.parametrize("kind", ["LeaderWorkerSet", "DisaggregatedSet", "Deployment"])
def test_the_only_group_of_a_role_goes_after_another_has_come(kind: str) -> None:
    values = {"workers": {"kind": kind, "prefill": {"groups": 2}}}
    assert rollouts(values) == {"prefill": (0, 1), "decode": (1, 0)}
    values = overlaid(values, "autoscaling", value={"kind": "hpa", "prefill": {"min": 1}})
    assert rollouts(values)["prefill"] == (1, 0), "the fewest that there may be"
    values = {"workers": {"kind": kind, "common": {"surge": 2}, "decode": {"surge": 0}}}
    assert rollouts(values) == {"prefill": (2, 0), "decode": (0, 1)}


def test_a_worker_is_up_once_a_router_has_paired_it() -> None:
    """Or its predecessor would leave for one that serves nobody."""
    for values, token in (({}, ""), (load(BASE), " --token-file=/etc/epserve/admin-token/")):
        for pod in pod_templates(render(values)):
            if pod.component in ROLES:
                probe = pod.container["startupProbe"]
                command = probe["exec"]["command"][-1]
                asked = 'exec ctl probe pair "$POD_NAME" --router=epserve-router:8001'
                assert command.startswith(asked + token)
                # As long as it takes: the other role may wait for nodes.
                assert probe["failureThreshold"] * probe["periodSeconds"] > 86400


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


@pytest.fixture(scope="module", params=["kubernetes", "dns"])
def releases(request: pytest.FixtureRequest) -> tuple[list[Object], list[Object]]:
    """One, and another that joins it."""
    values = [
        overlaid(load(path), "router", "discovery", value=request.param) for path in (BASE, NEXT)
    ]
    return render(values[0], name="epserve"), render(values[1], name="epserve-next")


def selected(selector: dict[str, Any], objects: list[Object]) -> set[str]:
    """Components of the pods that have all of these labels."""
    labels = selector.get("matchLabels", selector)
    return {pod.component for pod in pod_templates(objects) if labels.items() <= pod.labels.items()}


def test_workers_join_the_routers_of_another_release(
    releases: tuple[list[Object], list[Object]],
) -> None:
    base, joined = releases
    assert {pod.component for pod in pod_templates(joined)} == set(ROLES)
    kinds = {each["kind"] for each in joined}
    assert not kinds & {"Role", "RoleBinding", "PrometheusRule", "Ingress", "Service", "Deployment"}
    (router,) = [pod for pod in pod_templates(base) if pod.component == "router"]
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in router.container["args"])
    names = {each["metadata"]["name"]: each for each in of_kind(base, "Service")}
    for role in ROLES:
        if flags["discovery"] == "dns":
            spec = names[flags[f"{role}-dns"].partition(".")[0]]["spec"]
            # A router has to see a worker before the worker can be ready.
            assert spec["publishNotReadyAddresses"] is True
            selector = spec["selector"]
        else:
            selector = dict(part.split("=") for part in flags[f"{role}-selector"].split(","))
        assert selected(selector, joined) == selected(selector, base) == {role}
    for pod in pod_templates(joined):
        assert "--router=epserve-router:8001" in str(pod.container["lifecycle"]["preStop"])
        assert "--router=epserve-router:8001" in str(pod.container["startupProbe"])


def test_networks_let_both_releases_workers_meet(
    releases: tuple[list[Object], list[Object]],
) -> None:
    for ours, others in (releases, releases[::-1]):
        for policy in of_kind(ours, "NetworkPolicy"):
            spec = policy["spec"]
            if selected(spec["podSelector"], ours) & set(ROLES):
                for rule in spec["ingress"][:2]:
                    (peer,) = rule["from"]
                    assert selected(peer["podSelector"], others) >= set(ROLES)


def test_what_one_release_guards_or_scrapes_is_not_the_others(
    releases: tuple[list[Object], list[Object]],
) -> None:
    """A pod under two disruption budgets cannot be evicted at all."""
    base, joined = releases
    for each in of_kind(joined, "PodDisruptionBudget", "PodMonitor"):
        assert selected(each["spec"]["selector"], base) == set()
    for each in of_kind(base, "PodDisruptionBudget", "PodMonitor", "Deployment"):
        assert selected(each["spec"]["selector"], joined) == set()


def test_the_example_serves_the_same_model_with_a_newer_image() -> None:
    base, joined = load(BASE), load(NEXT)
    assert joined["model"] == base["model"]
    assert joined["workers"] == base["workers"]
    assert joined["image"]["repository"] == base["image"]["repository"]
    assert joined["image"]["tag"] > base["image"]["tag"]
