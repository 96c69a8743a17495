"""The alert rules, judged by promtool."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.metric_families import families
from tests.observability.alert_cases import CASES, UP, Case
from tests.observability.shipped import ALERT_FILES, REPOSITORY, alerts
from tests.observability.tools import tool

# Whoever is first may have to fetch promtool.
pytestmark = pytest.mark.timeout(900)

SEVERITIES = {"critical", "warning", "info"}
RUNBOOK = REPOSITORY / "docs" / "runbook.md"


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    said = promtool("check", "rules", "--lint=all", "--lint-fatal", *map(str, ALERT_FILES))
    assert f"{len(alerts())} rules found" in said


def test_every_alert_says_what_to_do() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in alerts())
    for rule in alerts():
        assert rule["labels"]["severity"] in SEVERITIES
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}
        assert notes["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert notes["description"].endswith(".")


def test_the_runbook_names_things_that_exist() -> None:
    text = RUNBOOK.read_text()
    anchors = {one.lower() for one in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\(#(\w+)\)", text)) <= anchors
    flags = set(re.findall(r"--[a-z][a-z-]+", (REPOSITORY / "docs/configuration.md").read_text()))
    own = {"--grace", "--plan", "--apply", "--workers"}  # of ctl, and of the gateway
    assert set(re.findall(r"--[a-z][a-z-]+", text)) - own <= flags


def test_the_docs_name_metrics_that_exist() -> None:
    known = {series for family in families() for series in (family.name, *family.series)}
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        named = set(re.findall(r"\bepserve_[a-z0-9_]*[a-z0-9]\b(?!_)", page.read_text()))
        assert named <= known, page.name


def test_each_alert_has_a_case() -> None:
    assert sorted(case.alert for case in CASES) == sorted(rule["alert"] for rule in alerts())


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """promtool wants the annotations word for word: they are left out here."""
    groups = [group for path in ALERT_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    severities = {}
    for group in groups:
        for rule in group["rules"]:
            del rule["annotations"]
            severities[rule["alert"]] = rule["labels"]["severity"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    tests = [test for case in CASES for test in promtool_tests(case, severities[case.alert])]
    suite = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    promtool("test", "rules", str(tmp_path / "suite.yaml"))


def promtool_tests(case: Case, severity: str) -> list[dict[str, Any]]:
    """One that must find the alert (and no sooner than it may), and one that must not."""
    raised = {"exp_labels": {"severity": severity} | case.labels}
    fires = [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": [raised]}]
    if case.since:
        fires.append({"eval_time": case.since, "alertname": case.alert, "exp_alerts": []})
    silent = [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": []}]
    around = {} if case.alert.endswith("Absent") else UP
    return [
        {"name": name, "interval": "1m", "alert_rule_test": checks,
         "input_series": [{"series": one, "values": values} for one, values in series.items()]}
        for name, checks, series in (
            (f"{case.alert} fires", fires, around | case.fires),
            (f"{case.alert} is quiet", silent, UP | case.quiet),
        )
    ]  # fmt: skip


def releases(role: str, values: str) -> dict[str, str]:
    return {f'epserve_build_info{{role="{role}",version="1"}}': values}


def gauge(name: str, role: str, label: str, values: str) -> dict[str, str]:
    return {f'epserve_router_{name}{{role="{role}",{label}}}': values}


# Nothing is scraped for 4 minutes, while images are pulled. Prefill loads for 60 minutes and decode
# for 100, after which it is ready or not.
INSTALL = {
    **releases("router", "_x4 1x300"), **releases("gateway", "_x9 1x300"),
    **releases("prefill", "_x9 1x300"), **releases("decode", "_x9 1x300"),
    **gauge("workers", "prefill", 'state="ready"', "_x4 0x60 1x300"),
    **gauge("members", "prefill", 'standing="held"', "_x4 1x60 0x300"),
    **gauge("workers", "prefill", 'state="lost"', "_x4 0x300"),
    "epserve_router_rejected_workers": "_x4 0x300",
}  # fmt: skip
COMES_UP = {
    **INSTALL,
    **gauge("workers", "decode", 'state="ready"', "_x4 0x100 1x300"),
    **gauge("members", "decode", 'standing="held"', "_x4 1x100 0x300"),
}
DOES_NOT = {
    **INSTALL,
    **gauge("workers", "decode", 'state="ready"', "_x4 0x300"),
    **gauge("members", "decode", 'standing="held"', "_x4 1x300"),
}


def timeline(
    name: str, series: dict[str, str], raised: dict[str, tuple[dict[str, str], ...]]
) -> dict[str, Any]:
    """At some minutes of a story, all alerts: those `raised` at "2h" and "4h", no others."""
    checks = [
        {"eval_time": time, "alertname": rule["alert"], "exp_alerts": [
            {"exp_labels": labels} for labels in raised.get(f"{rule['alert']} {time}", ())
        ]}
        for time in ("1m", "3m", "6m", "20m", "40m", "64m", "104m", "2h", "4h")
        for rule in alerts()
    ]  # fmt: skip
    listed = [{"series": one, "values": values} for one, values in series.items()]
    return {"name": name, "interval": "1m", "alert_rule_test": checks, "input_series": listed}


def test_an_install_does_not_page(tmp_path: Path) -> None:
    """Nor does anything else fire while large models load; what never comes up is told of."""
    groups = [group for path in ALERT_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    for group in groups:
        for rule in group["rules"]:
            del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    decode = {"role": "decode"}
    raised = {
        "EpserveNoReadyWorkers 4h": (decode | {"severity": "critical"},),
        "EpserveWorkerNotReady 4h": (decode | {"severity": "warning"},),
    }
    no_gateway = {name: one for name, one in COMES_UP.items() if 'role="gateway"' not in name}
    absent = ({"severity": "critical"},)
    tests = [
        timeline("comes up", COMES_UP, {}),
        timeline("decode never does", DOES_NOT, raised),
        timeline("nor does the gateway", no_gateway, {
            f"EpserveGatewayAbsent {time}": absent for time in ("40m", "64m", "104m", "2h", "4h")
        }),
        timeline("nothing is installed", {}, {}),
    ]  # fmt: skip
    suite = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    promtool("test", "rules", str(tmp_path / "suite.yaml"))


def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    """promtool does judge: the same case with another label fails."""
    (tmp_path / "rules.yaml").write_text(ALERT_FILES[0].read_text())
    test = promtool_tests(CASES[0], "harmless")[0]
    suite = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", str(tmp_path / "suite.yaml"))


def test_an_alert_reads_well(tmp_path: Path) -> None:
    """Its templates, filled in by Prometheus."""
    (tmp_path / "rules.yaml").write_text(ALERT_FILES[0].read_text())
    case = next(one for one in CASES if one.alert == "EpserveRequestsFail")
    test = promtool_tests(case, "critical")[0]
    test["alert_rule_test"][0]["exp_alerts"][0]["exp_annotations"] = {
        "summary": "5% of requests fail",
        "description": "More than 2 % of requests end with an error that is not the client's.",
        "runbook_url": "docs/runbook.md#epserverequestsfail",
    }
    suite = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    promtool("test", "rules", str(tmp_path / "suite.yaml"))
