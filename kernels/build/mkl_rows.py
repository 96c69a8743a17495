"""What MKL, torch's library of products on a CPU, is asked for so that rows stay by themselves.

On Intel's processors MKL chooses by the number of rows in what order a product sums, and a row's
last bits hang on how many others there are, unless it is asked to be strictly reproducible: a
product of 4 x 1,024 x 1,024 then takes 1.6 times as long, one of 64 rows 1.1 times (measured with
AVX-512). Others are not asked: their rows are the same without, and they would get MKL's slowest
code.
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
