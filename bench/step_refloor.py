"""Floors of breakdowns that were written before, counted again; what was measured stays:

    python -m bench.step_refloor bench/results/details/decode_rank_*.json

For files of DeepSeek-V3 on one of eight ranks, after a change of how floors are counted or kernels
are sorted. Floors are for the rate that a file has, else for --bytes-per-second. Passes of prefill
have none.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from bench.deepseek_v3_config import WeightFormat, write_config
from bench.emulated_rank import NUM_RANKS
from bench.step_breakdown import Kernel, write_breakdown
from bench.step_floor import StepFloor
from bench.step_operations import decode_operations
from model.config import ModelConfig

_DECODE = re.compile(r"(\w+)( static scales)?, (\d+) layers, context (\d+), batch (\d+)")


def refloor(path: Path, bytes_per_second: float | None) -> None:
    """ValueError for a file without a rate where none is given, too."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kernels = [
        Kernel(name=each["name"], count=each["count"], microseconds=each["microseconds"])
        for each in content["kernels"]
    ]
    match = _DECODE.fullmatch(content["case"])
    floor = None
    if match is not None:
        rate = content.get("bytes_per_second") or bytes_per_second
        if rate is None:
            raise ValueError(f"{path} has no rate of a copy: --bytes-per-second")
        floor = _decode_floor(match, rate)
    write_breakdown(path, content["case"], kernels, floor)


def _decode_floor(match: re.Match[str], bytes_per_second: float) -> StepFloor:
    weights = cast("WeightFormat", match[1] + ("-static" if match[2] else ""))
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), weights=weights, num_layers=int(match[3]))
        config = ModelConfig.from_folder(folder)
    operations = decode_operations(
        config,
        weights=weights,
        num_slots=config.num_experts // NUM_RANKS,
        batch=int(match[5]),
        context=int(match[4]),
    )
    return StepFloor(operations=operations, bytes_per_second=bytes_per_second)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count the floors of breakdowns again.")
    parser.add_argument("breakdowns", type=Path, nargs="+")
    parser.add_argument("--bytes-per-second", type=float, help="of a copy, for files without it")
    options = parser.parse_args(arguments)
    for path in options.breakdowns:
        refloor(path, options.bytes_per_second)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
