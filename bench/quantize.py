"""How fast a checkpoint becomes int4: `python -m bench.quantize`.

Makes up a checkpoint in block FP8 with experts of DeepSeek-V3's sizes, in `--folder`, which stands
for the disk, and runs `model.quantize` with each number of `--processes`. Files are not in memory
when a run begins. Counted are bytes of the source, from the end of the first piece to the end of
the process: the start is left out, the last file's way to the disk is not. The peer copies the
checkpoint with as many threads: it computes nothing, reads as much and writes nearly twice as much.

    python -m bench.quantize --processes 1 2 --record
    python -m bench.quantize --layers 1 --experts 512 --processes 1 4 8 16 --record

`--record` appends to bench/results/quantize.jsonl.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from bench.ranks.deepseek_v3_config import write_config
from bench.records import bench_parser, path_of, report, say
from loadgen.records import BenchRun, Record
from model.weights.dummy_checkpoint import DummyCheckpoint
from model.weights.stored import INDEX

if TYPE_CHECKING:
    import torch

BENCH = "quantize"
FILE_BYTES = 4 << 30
FULL_GB = 671  # DeepSeek-V3 in FP8


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="on the disk to measure")
    parser.add_argument("--layers", type=int, default=2, help="with experts")
    parser.add_argument("--experts", type=int, default=32, help="of a layer; 44 MB each")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    run = BenchRun.begin(BENCH, on_cpu=arguments.device == "cpu")
    with TemporaryDirectory(dir=arguments.folder) as folder:
        model = write_checkpoint(Path(folder) / "fp8", arguments.layers, arguments.experts)
        for processes in arguments.processes:
            records = measure(run, model, arguments.device, processes)
            source, *_ = report(records, path_of(BENCH, arguments))
            say(f"{source.case}: {FULL_GB} GB in {FULL_GB / source.value / 60:.2f} h")


def write_checkpoint(folder: Path, num_layers: int, num_experts: int, **others: int) -> Path:
    """Random weights; tensors of one shape hold the same. `others` are sizes in place of
    DeepSeek-V3's."""
    sizes = {"n_routed_experts": num_experts, "first_k_dense_replace": 0, "vocab_size": 1024}
    sizes |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1} | others
    write_config(folder, weights="fp8", num_layers=num_layers, sizes=sizes)
    checkpoint = DummyCheckpoint(folder)
    made: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_files(checkpoint), start=1):
        tensors = {}
        for name in names:
            stored = checkpoint.stored[name]
            key = (stored.dtype, stored.shape)
            made[key] = made[key] if key in made else checkpoint.raw(name)
            tensors[name] = made[key].clone()
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def _files(checkpoint: DummyCheckpoint) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name in checkpoint.stored:
        names.append(name)
        num_bytes += checkpoint.num_bytes(name)
        if num_bytes >= FILE_BYTES:
            yield names
            names, num_bytes = [], 0
    yield names


def measure(run: BenchRun, model: Path, device: str, processes: int) -> list[Record]:
    """GB of the source a minute, and processor time, which tells more where others are busy."""
    case = f"FP8 experts to int4 on {device}, {processes} process{'es' * (processes > 1)}"
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    _forget(model)
    before = getrusage(RUSAGE_CHILDREN)
    value = quantize(model, model.with_name("w4afp8"), device, processes)
    after = getrusage(RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    _forget(model)
    peer_value = copy(model, model.with_name("copied"), processes)
    peer = "a copy by as many threads"
    return [
        run.record(case, "source", "GB/min", value, peer=peer, peer_value=peer_value),
        run.record(case, "processor time, starts included", "s/GB", seconds / num_bytes * 1e9),
    ]


def quantize(model: Path, output: Path, device: str, processes: int) -> float:
    """GB a minute."""
    command = [sys.executable, "-m", "model.quantize", "--model", str(model), "--output"]
    command += [str(output), "--device", device, "--processes", str(processes)]
    began, num_bytes = 0.0, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            event = json.loads(line)
            if event["event"] == "plan":
                num_bytes = event["num_bytes"]
            if event["event"] == "progress" and not began:
                began = time.monotonic()
                num_bytes -= event["num_bytes"]
    seconds = time.monotonic() - began
    if child.returncode:
        raise SystemExit(event.get("message", f"ended by {child.returncode} after {event}"))
    shutil.rmtree(output)
    return 60e-9 * num_bytes / seconds


def copy(model: Path, output: Path, threads: int) -> float:
    """GB a minute."""
    output.mkdir()
    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        num_bytes = sum(pool.map(partial(_copy_file, output=output), model.iterdir()))
    seconds = time.monotonic() - began
    shutil.rmtree(output)
    return 60e-9 * num_bytes / seconds


def _copy_file(path: Path, output: Path) -> int:
    with path.open("rb") as source, (output / path.name).open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
        target.flush()
        os.fsync(target.fileno())
        return target.tell()


def _forget(folder: Path) -> None:
    """Files leave the page cache, as far as we may have them do so."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
