"""Plans for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal

from core.group_plan import GroupPlan, HostNeeds
from ctl.base.tables import format_age, make_table

_GIB = 1 << 30


def print_plans(plans: Sequence[GroupPlan], console: Console, disk_gbs: float = 1.0) -> None:
    """What each group comes to; what does not fit last, where it is seen."""
    for plan in sorted(plans, key=lambda each: bool(each.problem)):
        _print_plan(plan, console, disk_gbs)


def headline(plan: GroupPlan) -> str:
    """decode: 9 x 8 ranks on h200, DeepSeek-V3 (fp8): fits"""
    shape = f"{plan.nodes} x {plan.ranks}" if plan.nodes > 1 else str(plan.ranks)
    ranks = "rank" if plan.nodes * plan.ranks == 1 else "ranks"
    weights = plan.model_format or "not quantised"
    verdict = "does not fit" if plan.problem else "fits"
    return f"{plan.name}: {shape} {ranks} on {plan.gpu.name}, {plan.model} ({weights}): {verdict}"


def _print_plan(plan: GroupPlan, console: Console, disk_gbs: float) -> None:
    console.print(headline(plan), style="bold red" if plan.problem else "bold green")
    if plan.terms:
        console.print(_terms_table(plan))
    facts = make_table("", "", fold="")
    for name, text in _facts(plan, disk_gbs):
        facts.add_row(name, text)
    facts.show_header = False
    console.print(facts)
    if plan.problem and not plan.terms:
        console.print(f"cannot start: {plan.problem}", soft_wrap=True)
    if plan.problem:
        console.print(_advice(plan), soft_wrap=True)
    console.print()


def _terms_table(plan: GroupPlan) -> object:
    table = make_table("memory of a GPU", "GiB", "share", right=("GiB", "share"))
    total = sum(term.num_bytes for term in plan.terms)
    rows = [(term.name, term.num_bytes) for term in plan.terms if term.num_bytes]
    for name, num_bytes in (*rows, ("total", total), ("there is", plan.memory_bytes)):
        share = num_bytes / plan.memory_bytes
        table.add_row(name, f"{num_bytes / _GIB:.2f}", f"{share:.1%}")
    return table


def _facts(plan: GroupPlan, disk_gbs: float) -> list[tuple[str, str]]:
    facts = [("experts", f"{plan.slots} of a layer on each rank")]
    if plan.dispatcher:
        facts.append(("dispatcher", f"{plan.dispatcher}: {plan.dispatcher_reason}"))
        unit = "tokens" if plan.role == "prefill" else "requests, a token each"
        parts = f", {plan.part_tokens} at once between ranks" if plan.part_tokens else ""
        facts.append(("largest step", f"{plan.step_tokens} {unit}{parts}"))
    if plan.kv_pages:
        pages = f"{plan.kv_tokens} tokens a rank, in {plan.kv_pages} pages of {plan.page_tokens}"
        facts.append(("KV", pages))
        longest = f"{plan.max_model_len} tokens"
        if plan.max_model_len < plan.model_max_len:
            longest += f" (the model can {plan.model_max_len})"
        facts.append(("longest request", longest))
    return [*facts, *_host_facts(plan.host, disk_gbs)] if plan.host else facts


def _host_facts(host: HostNeeds, disk_gbs: float) -> list[tuple[str, str]]:
    cached = f"{gib(host.read_bytes)} more keep what it read for a restart"
    seconds = host.read_bytes / (disk_gbs * 1e9)
    return [
        ("a node needs", f"{host.cpus} CPUs, {gib(host.memory_bytes)} of memory; {cached}"),
        ("of it shared", f"{gib(host.shared_memory_bytes)} of /dev/shm"),
        ("a node reads", f"{decimal(host.read_bytes)}: {format_age(seconds)} at {disk_gbs:g} GB/s"),
        ("checkpoint", f"{gib(host.checkpoint_bytes)}"),
    ]


def gib(num_bytes: int) -> str:
    """As Kubernetes takes it, rounded up."""
    return f"{-(-num_bytes // _GIB)}Gi"


def _advice(plan: GroupPlan) -> str:
    if not plan.advice:
        return "No smaller step and none of the other changes that were tried makes it fit."
    lines = [f"  {each.change}: {each.kv_tokens} KV tokens a rank" for each in plan.advice]
    return "\n".join(["It fits with one of:", *lines])
