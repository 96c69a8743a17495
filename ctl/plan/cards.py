"""GPUs by name, and those of this machine."""

from core.group_plan import Gpu
from ctl.base.host import Host

GIB = 1 << 30
_MIB = 1 << 20
# GiB as CUDA tells them, the least that drivers were seen to leave: less than what is on the card.
CARDS_GIB = {
    "h100": 79.1,
    "h100-nvl": 93.0,
    "h200": 139.7,
    "h800": 79.1,
    "h20": 95.0,
    "h20-141": 139.7,
}
_HOPPER = 9
_QUERY = "name,memory.total,memory.reserved,memory.free,compute_cap"


def card(text: str) -> Gpu:
    """By its name, or by the GiB that CUDA tells. ValueError for one that is not known."""
    name = text.lower()
    try:
        gib = CARDS_GIB[name] if name in CARDS_GIB else float(name.removesuffix("gib"))
    except ValueError:
        known = ", ".join(CARDS_GIB)
        raise ValueError(
            f"{text!r} is not known: {known}, or a number of GiB as CUDA tells it"
        ) from None
    if not 1 <= gib <= 1024:
        raise ValueError(f"{text}: no GPU has {gib:g} GiB")
    num_bytes = int(gib * GIB)
    return Gpu(name=name, total_bytes=num_bytes, free_bytes=num_bytes)


def own_cards(host: Host, visible: str | None) -> list[Gpu]:
    """Of this machine, as its driver tells them; `visible` is CUDA_VISIBLE_DEVICES. Empty where
    one does not tell its memory."""
    only = [f"--id={visible}"] if visible else []
    listed = host.run("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", *only)
    try:
        return [_own_card(line) for line in listed.splitlines()]
    except ValueError:
        return []


def _own_card(line: str) -> Gpu:
    name, total, reserved, free, capability = (field.strip() for field in line.split(","))
    return Gpu(
        name=name.removeprefix("NVIDIA "),
        total_bytes=(int(total) - int(reserved)) * _MIB,  # CUDA does not count what is reserved
        free_bytes=int(free) * _MIB,
        is_hopper=float(capability) >= _HOPPER,
    )
