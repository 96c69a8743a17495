"""Whether a model fits the GPUs of this machine."""

import os
from pathlib import Path

from ctl.base.flags import WORKER_ROLES
from ctl.base.host import Host
from ctl.doctor.finding import Finding, note, ok, warning
from ctl.plan.asking import NoPlan
from ctl.plan.cards import own_cards
from ctl.plan.layouts import fitting_layout


def check_fit(host: Host, folder: Path) -> Finding:
    """As one prefill and one decode worker of `ctl up`; a plan that fails is no verdict."""
    gpus = own_cards(host, os.environ.get("CUDA_VISIBLE_DEVICES"))
    elsewhere = f"ctl plan --model {folder} --gpu h200 --nodes 2 says what fits elsewhere."
    if not gpus:
        return note("fit", "no GPU here tells its memory", elsewhere)
    flags = {"model": str(folder), "device": "cuda"}
    try:
        found = fitting_layout(dict.fromkeys(WORKER_ROLES, flags), gpus)
    except (ValueError, NoPlan) as error:
        return warning("fit", str(error), "Ranks will say the same: mend it first.")
    if found is None:
        return warning("fit", f"not on these {len(gpus)} GPUs alone", elsewhere)
    layout, plans = found
    room = ", ".join(f"{plan.role} {plan.kv_tokens} KV tokens a rank" for plan in plans)
    if layout.int4:
        return warning("fit", "only with int4 experts", f"ctl quantize, then {layout.text()}")
    return ok("fit", f"ctl up {layout.text()}: {room}")
