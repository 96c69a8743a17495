"""How fast a rank loads its weights: `python -m bench.load FOLDER --layers 10 --record`.

FOLDER gets a made-up checkpoint of DeepSeek-V3's sizes, where it has none: on the disk that is to
be measured, or in memory (/dev/shm). The bytes that one rank needs are read

    plainly   by as many threads as a rank has, in order of place, into memory that is used again:
              what the disk gives
    to the device   as a rank reads them, and nothing is made of them
    loaded    as a rank does it: the model is ready then

once from the disk, with the files' pages given up before ("cold"), and once from the page cache
("warm"). The peer of the last two is the first. `--ranks` is the size of the group whose first rank
is measured; with `--at-once` so many processes read as the ranks of one node at the same time, and
what is read from the disk is compared with the size of the files.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue

import torch

from bench.ranks.deepseek_v3_config import SMALL, write_config
from bench.records import bench_parser, path_of, report
from bench.serving.made_up_checkpoint import write_checkpoint
from engine.process.rank_start import HUGE_PAGES
from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import Placement
from loadgen.records import BenchRun, Record
from model.batch import AttentionForm
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.known_models import QUANTIZATION
from model.weights import file_reader
from model.weights.checkpoint import Checkpoint
from model.weights.file_reader import CHUNK_BYTES
from model.weights.load_order import loaded_tensors
from model.weights.stored import INDEX

BENCH = "load"
NUM_THREADS = file_reader.NUM_THREADS
PEER = "plain reads by as many threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of rank `rank` of `num_ranks`, which the experts are shared out to."""

    folder: Path
    device: torch.device
    num_ranks: int
    rank: int = 0

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_folder(self.folder)

    @property
    def placement(self) -> Placement:
        config = self.config
        return Placement.trivial(config.num_moe_layers, config.num_experts, self.num_ranks)

    def names(self, checkpoint: Checkpoint) -> list[str]:
        layers = range(self.config.num_moe_layers)
        slots = [self.placement.local_experts(layer, self.rank) for layer in layers]
        return [*loaded_tensors(checkpoint.stored, self.config, slots)]

    def plainly(self) -> int:
        """Bytes read."""
        with Checkpoint(self.folder) as checkpoint:
            chunks = [*_chunks(checkpoint, self.names(checkpoint))]
        memory: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(file_reader.NUM_THREADS):
            memory.put(bytearray(CHUNK_BYTES))
        handles = {path: os.open(path, os.O_RDONLY) for path, _, _ in chunks}

        def read(chunk: tuple[Path, int, int]) -> int:
            path, begin, num_bytes = chunk
            buffer = memory.get()
            done = os.preadv(handles[path], [memoryview(buffer)[:num_bytes]], begin)
            memory.put(buffer)
            return done

        with ThreadPoolExecutor(file_reader.NUM_THREADS) as threads:
            num_bytes = sum(threads.map(read, chunks))
        for handle in handles.values():
            os.close(handle)
        return num_bytes

    def to_device(self) -> int:
        """Bytes read."""
        with Checkpoint(self.folder, self.device) as checkpoint:
            names = self.names(checkpoint)
            checkpoint.read_ahead(names)
            for name in names:
                checkpoint.raw(name)
            self._wait()
            return checkpoint.bytes_read

    def loaded(self) -> int:
        """Bytes read."""
        placement, source = self.placement, Checkpoint(self.folder, self.device)
        local = LocalDispatcher(placement.slots_per_rank, 1)
        DeepseekV3.load(
            self.folder,
            device=self.device,
            dtype=torch.bfloat16,
            experts=ExpertShard.build(placement, self.rank, local, self.device),
            form=AttentionForm.ABSORBED,
            source=source,
        )
        self._wait()
        return source.bytes_read

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _chunks(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, bytes) in order of place; what lies next to each other is read together."""
    for path, begin, end in _runs(checkpoint, names):
        with path.open("rb") as file:
            data_begin = 8 + int.from_bytes(file.read(8), "little")
        for offset in range(begin, end, CHUNK_BYTES):
            yield path, data_begin + offset, min(CHUNK_BYTES, end - offset)


def _runs(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[tuple[Path, int, int]]:
    """(file, begin, end), counted from the end of its header."""
    places = sorted((checkpoint.stored[n].file, *checkpoint.stored[n].offsets) for n in names)
    path, begin, end = places[0]
    for next_path, next_begin, next_end in places[1:]:
        if (next_path, next_begin) != (path, end):
            yield path, begin, end
            path, begin = next_path, next_begin
        end = next_end
    yield path, begin, end


def forget_pages(folder: Path) -> None:
    """The page cache gives up the folder's files."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def bytes_from_disk() -> int:
    """That this process has caused to be read."""
    fields = Path("/proc/self/io").read_text(encoding="utf-8").split()
    return int(fields[fields.index("read_bytes:") + 1])


def timed(call: Callable[[], int]) -> float:
    """GB/s."""
    began = time.perf_counter()
    num_bytes = call()
    return num_bytes / 1e9 / (time.perf_counter() - began)


def measure(load: Load, run: BenchRun, case: str, arguments: Namespace) -> Iterator[Record]:
    calls = {"plain": load.plainly, "to the device": load.to_device, "loaded": load.loaded}
    if arguments.reads_only:
        del calls["loaded"]
    load.to_device()  # what a first use takes: a context, pinned memory
    for state in ("warm",) if arguments.no_disk else ("cold", "warm"):
        best = dict.fromkeys(calls, 0.0)
        for _ in range(arguments.repeats):  # in turns: others may use the machine
            for metric, call in calls.items():
                if state == "cold":
                    forget_pages(load.folder)
                best[metric] = max(best[metric], timed(call))
        for metric, speed in best.items():
            peer_value = None if metric == "plain" else best["plain"]
            yield run.record(
                f"{case}, {state}", metric, "GB/s", speed, peer=PEER, peer_value=peer_value
            )


def read_as(load: Load) -> tuple[int, int]:
    """In a process of its own: bytes read, and of these from the disk."""
    before = bytes_from_disk()
    num_bytes = load.to_device()
    return num_bytes, bytes_from_disk() - before


def measure_together(load: Load, run: BenchRun, case: str) -> Iterator[Record]:
    """All ranks of a node at once, cold."""
    ranks = [replace(load, rank=rank) for rank in range(load.num_ranks)]
    with ProcessPoolExecutor(load.num_ranks, mp_context=get_context("spawn")) as processes:
        list(processes.map(read_as, ranks))  # what a first use takes
        forget_pages(load.folder)
        began = time.perf_counter()
        read, from_disk = (sum(each) for each in zip(*processes.map(read_as, ranks), strict=True))
        seconds = time.perf_counter() - began
    num_bytes = sum(path.stat().st_size for path in load.folder.glob("*.safetensors"))
    case = f"{case}, all at once, cold"
    yield run.record(case, "to the devices", "GB/s", read / 1e9 / seconds)
    yield run.record(
        case, "from the disk", "GB", from_disk / 1e9, peer="the files", peer_value=num_bytes / 1e9
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("folder", type=Path, help="of the checkpoint, which is made there")
    parser.add_argument("--layers", type=int, default=10, help="of which 3 are dense")
    parser.add_argument("--weights", choices=QUANTIZATION, default="w4afp8")
    parser.add_argument("--ranks", type=int, default=1, help="of the group")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--at-once", action="store_true", help="all ranks, on one device")
    parser.add_argument("--no-disk", action="store_true", help="FOLDER is in memory")
    parser.add_argument("--small", action="store_true", help="a model of a moment")
    parser.add_argument("--threads", type=int, default=NUM_THREADS, help="that read")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts")
    parser.add_argument("--reads-only", action="store_true", help="no whole loads")
    arguments = parser.parse_args(argv)
    file_reader.NUM_THREADS = arguments.threads
    os.environ |= HUGE_PAGES  # as ranks have them
    device = torch.device(arguments.device)
    if not (arguments.folder / INDEX).exists():
        sizes = SMALL if arguments.small else None
        write_config(
            arguments.folder, weights=arguments.weights, num_layers=arguments.layers, sizes=sizes
        )
        write_checkpoint(arguments.folder, device)
    load = Load(folder=arguments.folder, device=device, num_ranks=arguments.ranks)
    run = BenchRun.begin(BENCH, on_cpu=device.type == "cpu")
    case = f"{arguments.weights}, {load.config.num_layers} layers, a rank of {load.num_ranks}"
    if arguments.threads != NUM_THREADS:
        case += f", {arguments.threads} threads"
    records = (
        measure_together(load, run, case)
        if arguments.at_once
        else measure(load, run, case, arguments)
    )
    report(records, path_of(BENCH, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
