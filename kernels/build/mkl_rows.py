"""What MKL, torch's library of products on a CPU, is asked for so that rows stay by themselves.

On Intel's processors MKL chooses by the number of rows in what order it sums, and a row's last bits
depend on how many others there are, unless it is asked to be strictly reproducible: 4 rows x 1,024
x 1,024 then take 1.6 times as long, 64 rows 1.1 times (AVX-512). On other processors rows are the
same without, and it would take its slowest code.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "MKL_CBWR"  # conditional bitwise reproducibility, in MKL's manual
STRICT = "AUTO,STRICT"
_INTEL = "GenuineIntel"


def ask_for_rows_by_themselves(
    environment: MutableMapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")
) -> None:
    """To be called before the process's first product, at which MKL looks. What the environment
    says already is left as it is."""
    if _INTEL in _vendor(cpuinfo):
        environment.setdefault(VARIABLE, STRICT)


def _vendor(cpuinfo: Path) -> str:
    """Empty where nothing tells."""
    try:
        with cpuinfo.open(encoding="utf-8") as lines:
            return next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
