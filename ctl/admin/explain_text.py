"""An explanation for people: the choice of each pair, then what each worker did."""

from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from typing import Any

from rich.console import Console

from ctl.base.tables import format_bytes, format_duration, make_table

# Key of a leg, the line's title, and how the value reads; roles that have no such thing show "-".
_LINES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("role", "role", str),
    ("rank", "rank", str),
    ("accepted_at", "accepted", lambda at: format_time(at)),
    ("queue_seconds", "waited for a rank", format_duration),
    ("num_prompt_tokens", "prompt tokens", str),
    ("num_earlier_tokens", "tokens of earlier calls", str),
    ("num_cached_tokens", "of these cached", str),
    ("num_computed_tokens", "computed", str),
    ("compute_seconds", "computing", format_duration),
    ("kv_bytes", "KV moved", format_bytes),
    ("transfer_seconds", "moving KV", format_duration),
    ("num_attempts", "prefill attempts", str),
    ("num_preemptions", "preemptions", str),
    ("first_token_seconds", "first token after", format_duration),
    ("num_steps", "decode steps", str),
    ("num_output_tokens", "output tokens", str),
    ("total_seconds", "over after", format_duration),
    ("finish", "finish", lambda finish: finish or "still open"),
)
_DECODE_ONLY = frozenset({"num_attempts", "num_preemptions", "num_steps"})


def format_time(unix_seconds: float) -> str:
    """Local time of day, milliseconds."""
    return datetime.fromtimestamp(unix_seconds).astimezone().strftime("%H:%M:%S.%f")[:-3]


def print_explanation(report: dict[str, Any], console: Console) -> None:
    """`report` as `ctl.admin.explain.describe` makes it."""
    for assignment in report["assignments"]:
        _print_assignment(assignment, console)
    legs = sorted(report["legs"], key=lambda leg: leg["leg_id"])
    for leg_id, group in groupby(legs, key=lambda leg: leg["leg_id"]):
        _print_legs(leg_id, sorted(group, key=lambda leg: leg["accepted_at"]), console)
    for name in report["unreachable"]:
        console.print(f"{name} had a part in it and does not answer any more")


def _print_assignment(assignment: dict[str, Any], console: Console) -> None:
    leg_id, outcome = assignment["leg_id"], assignment["outcome"]
    at, waited = format_time(assignment["at"]), format_duration(assignment["queue_seconds"])
    told = (
        f"{leg_id}: assigned at {at} after {waited} in line; {assignment['num_prompt_tokens']} "
        f"prompt tokens, {assignment['num_matched_pages']} pages of them expected at prefill"
    )
    if outcome != "ok":
        told = f"{leg_id}: not assigned ({outcome}) at {at}, {waited} after it was asked for"
    console.print(told, soft_wrap=True)
    table = make_table("", "role", "worker", "score", "because", fold="because")
    for each in assignment["candidates"]:
        if each["rejected_by"]:
            score, because = "-", f"left out by filter {each['rejected_by']}"
        else:
            score, because = f"{each['score']:.3f}", _because(each["parts"])
        mark = "*" if each["chosen"] else ""
        table.add_row(mark, each["role"], each["worker"], score, because)
    console.print(table)
    console.print()


def _because(parts: list[dict[str, Any]]) -> str:
    return ", ".join(f"{p['scorer']} {p['score']:.3f} (weight {p['weight']:g})" for p in parts)


def _print_legs(leg_id: str, legs: list[dict[str, Any]], console: Console) -> None:
    table = make_table(leg_id, *(leg["worker"] for leg in legs))
    for key, title, text in _LINES:
        values = [
            "-" if key in _DECODE_ONLY and leg["role"] != "decode" else text(leg[key])
            for leg in legs
        ]
        table.add_row(title, *values)
    console.print(table)
    console.print()
