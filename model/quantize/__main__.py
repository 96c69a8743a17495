"""Routed experts of a BF16 or block-FP8 checkpoint to int4, as a new checkpoint folder.

    python -m model.quantize --model FOLDER --output FOLDER --format w4afp8 [--resume]

Works file by file, several pieces of files at once, and can be carried on after any interruption.
The new folder gets its config.json last, so that until then it is not taken for a model. Progress
goes to stdout, one JSON object a line; `ctl quantize` shows it to people. Exit status 2 is wrong
usage, 1 everything else.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from core.errors import CheckpointError
from core.process import die_with_parent
from model.config import Fields
from model.quantize.journal import NAME as JOURNAL
from model.quantize.journal import Busy, Foreign, Journal, source_identity
from model.quantize.plan import Shard, quantised_config
from model.quantize.processes import Makers, Processes, ThisProcess
from model.quantize.shard import PARTIAL_SUFFIX, Job, ShardMaker, remove_partial, sync_folder
from model.w4afp8 import QUANT_METHOD
from model.weights.stored import INDEX

CONFIG = "config.json"
# Weights in other containers would be the unquantised ones.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
REPORT_SECONDS = 0.2
# While one waits for the disk or the hash of a file, others keep the GPU busy.
PROCESSES_PER_GPU = 8


class UsageError(ValueError):
    """What was asked for makes no sense; nothing was touched."""


class Reporter:
    """JSON lines on stdout."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._said_at = 0.0

    def say(self, event: str, **fields: object) -> None:
        sys.stdout.write(json.dumps({"event": event} | fields) + "\n")
        sys.stdout.flush()

    def progress(self, num_bytes: int) -> None:
        """More bytes of the source are done."""
        self._num_bytes += num_bytes
        now = time.monotonic()
        if now - self._said_at >= REPORT_SECONDS:
            self._said_at = now
            self.say("progress", num_bytes=self._num_bytes)


def main(argv: Sequence[str] | None = None) -> int:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="model.quantize", description=description)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--format", choices=(QUANT_METHOD,), default=QUANT_METHOD)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (all GPUs) or cuda:1")
    parser.add_argument("--processes", type=int, help="default: as many as cores, 8 for a GPU")
    parser.add_argument("--parent", type=int, default=0, help="process that this one ends with")
    arguments = parser.parse_args(argv)
    if arguments.parent:
        die_with_parent(arguments.parent)
    reporter = Reporter()
    try:
        quantise_folder(
            arguments.model,
            arguments.output,
            resume=arguments.resume,
            devices=_devices(arguments.device, arguments.processes),
            reporter=reporter,
        )
    except (UsageError, Foreign, Busy) as error:
        reporter.say("error", message=str(error))
        return 2
    except (CheckpointError, OSError) as error:
        reporter.say("error", message=str(error))
        return 1
    except KeyboardInterrupt:
        reporter.say("error", message="interrupted; --resume carries on")
        return 1
    except Exception:  # noqa: BLE001 - who reads the events is to know of it
        reporter.say("error", message=traceback.format_exc())
        return 1
    return 0


def quantise_folder(
    model: Path, output: Path, *, resume: bool, devices: Sequence[str], reporter: Reporter
) -> None:
    """A process for each of `devices`. Raises UsageError, Foreign or Busy before anything is
    written; CheckpointError, OSError."""
    model, output = model.expanduser().resolve(), output.expanduser().resolve()
    if _is_complete(output) and resume:
        reporter.say("done", num_shards_kept=0, complete=True)  # by an earlier run
        return
    _check_folders(model, output, resume=resume)
    fields = Fields.read(model / CONFIG)
    with ExitStack() as stack:
        maker = ShardMaker(model, output, devices[0])
        stack.callback(maker.close)
        output.mkdir(parents=True, exist_ok=True)
        journal = stack.enter_context(Journal(output, source_identity(maker.checkpoint)))
        remove_partial(output)  # of a run that was killed
        stack.callback(remove_partial, output)
        alone = len(devices) == 1
        makers: Makers = ThisProcess(maker) if alone else Processes(model, output, devices)
        stack.enter_context(makers)
        num_kept = _make_shards(maker, output, journal, makers, reporter)
        _copy_others(model, output)
        if (model / INDEX).is_file():
            _write_json(output / INDEX, _index([*maker.shards.values()]))
        _write_json(output / CONFIG, quantised_config(dict(fields.values), maker.checkpoint))
        journal.remove()
    reporter.say("done", num_shards_kept=num_kept, complete=False)


def _make_shards(
    maker: ShardMaker, output: Path, journal: Journal, makers: Makers, reporter: Reporter
) -> int:
    """How many were there already."""
    kept = _kept(maker, journal, makers, reporter)
    shards = maker.shards.values()
    left = [shard for shard in shards if shard.name not in kept]
    pieces = {shard.name: [*maker.pieces(shard)] for shard in shards}
    jobs = deque(job for shard in left for job in pieces[shard.name])
    reporter.say(
        "plan",
        num_bytes=sum(job.num_bytes for job in jobs),
        num_bytes_source=sum(job.num_bytes for listed in pieces.values() for job in listed),
        num_bytes_output=sum(shard.num_bytes for shard in shards),
        num_shards=len(left),
        num_matrices=sum(len(shard.quantised) for shard in shards),
    )
    _check_room(output, sum(shard.num_bytes for shard in left))
    num_left = {name: len(listed) for name, listed in pieces.items()}
    for job, answer in makers.results(jobs):
        if job.verb == "finish":
            journal.add(job.shard, answer)
            reporter.say("shard", shard=job.shard)
            continue
        reporter.progress(job.num_bytes)
        num_left[job.shard] -= 1
        if not num_left[job.shard]:
            jobs.appendleft(Job("finish", job.shard))
    return len(kept)


def _kept(maker: ShardMaker, journal: Journal, makers: Makers, reporter: Reporter) -> set[str]:
    """Files that are there, with the bytes that were written."""
    finished = journal.finished()
    kept = set()
    for job, sha256 in makers.results(deque(Job("hash", name) for name in finished)):
        if job.shard in maker.shards and sha256 == finished[job.shard]:
            kept.add(job.shard)
            reporter.say("kept", shard=job.shard)
    return kept


def _check_folders(model: Path, output: Path, *, resume: bool) -> None:
    if not model.is_dir():
        raise UsageError(f"{model} is no folder")
    if not (model / CONFIG).is_file():
        raise UsageError(f"{model} has no {CONFIG}: no model folder")
    if output == model or model in output.parents or output in model.parents:
        raise UsageError(f"{output} and {model} have to be two folders, neither inside the other")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is no folder")
    if output.is_dir() and any(output.iterdir()):
        if not (output / JOURNAL).is_file():
            raise UsageError(f"{output} is not empty")
        if not resume:
            raise UsageError(f"{output} holds an unfinished quantisation: --resume carries on")


def _is_complete(output: Path) -> bool:
    """Whether an earlier run has come to its end here."""
    try:
        fields = Fields.read(output / CONFIG).values
    except CheckpointError:
        return False
    quantization = fields.get("quantization_config")
    is_ours = isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD
    return is_ours and not (output / JOURNAL).exists()


def _check_room(output: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(output).free
    if num_bytes > free:
        raise CheckpointError(
            f"{output}: {num_bytes / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free"
        )


def _copy_others(model: Path, output: Path) -> None:
    """Tokenizer and whatever else lies beside the weights; folders and hidden files do not."""
    for path in sorted(model.iterdir()):
        if path.name in (CONFIG, INDEX, JOURNAL) or path.name.startswith("."):
            continue
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES:
            partial = output / (path.name + PARTIAL_SUFFIX)
            shutil.copyfile(path, partial)
            partial.rename(output / path.name)


def _index(shards: Sequence[Shard]) -> dict[str, object]:
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    return {
        "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }


def _write_json(path: Path, value: object) -> None:
    """All of it, or nothing."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def _devices(text: str, num_processes: int | None) -> list[str]:
    """One for each process."""
    if num_processes is not None and num_processes < 1:
        raise UsageError(f"--processes {num_processes}: has to be at least 1")
    num_cores, num_gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    if text == "cpu" or (text == "auto" and not num_gpus):
        return ["cpu"] * (num_processes or num_cores)
    found = [f"cuda:{index}" for index in range(num_gpus)]
    gpus = found if text in ("auto", "cuda") else [one for one in found if one == text]
    if not gpus:
        known = ", ".join(["auto", "cpu", *(["cuda"] if found else []), *found])
        raise UsageError(f"--device {text}: here there are {known}")
    count = num_processes or min(PROCESSES_PER_GPU * len(gpus), max(num_cores, len(gpus)))
    return [gpus[index % len(gpus)] for index in range(count)]


if __name__ == "__main__":
    # SIGTERM ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
