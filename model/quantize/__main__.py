"""Routed experts of a BF16 or block-FP8 checkpoint to int4, as a new checkpoint folder.

    python -m model.quantize --model FOLDER --output FOLDER --format w4afp8 [--resume]

Works file by file and can be carried on after any interruption. The new folder gets its
config.json last, so that until then it is not taken for a model. Progress goes to stdout, one JSON
object a line; `ctl quantize` shows it to people. Exit status 2 is wrong usage, 1 everything else.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from core.errors import CheckpointError
from core.process import die_with_parent
from model.config import Fields, ModelConfig
from model.quantize.journal import NAME as JOURNAL
from model.quantize.journal import Busy, Foreign, Journal, source_identity
from model.quantize.plan import Shard, plan_shards, quantised_config
from model.quantize.shard import PARTIAL_SUFFIX, sync_folder, write_shard
from model.w4afp8 import QUANT_METHOD
from model.weights.checkpoint import INDEX, Checkpoint

CONFIG = "config.json"
# Weights in other containers would be the unquantised ones.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
REPORT_SECONDS = 0.2


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
    parser.add_argument("--device", default="cpu", help="what rounds: cpu, cuda or cuda:1")
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
            device=_device(arguments.device),
            reporter=reporter,
        )
    except (UsageError, Foreign, Busy) as error:
        reporter.say("error", message=str(error))
        return 2
    except (CheckpointError, OSError) as error:
        reporter.say("error", message=str(error))
        return 1
    return 0


def quantise_folder(
    model: Path, output: Path, *, resume: bool, device: torch.device, reporter: Reporter
) -> None:
    """Raises UsageError, Foreign or Busy before anything is written; CheckpointError, OSError."""
    model, output = model.expanduser().resolve(), output.expanduser().resolve()
    if _is_complete(output) and resume:
        reporter.say("done", num_shards_kept=0, complete=True)  # by an earlier run
        return
    _check_folders(model, output, resume=resume)
    fields = Fields.read(model / CONFIG)
    config = ModelConfig.from_folder(model)
    with Checkpoint(model) as checkpoint:
        shards = plan_shards(checkpoint, config)
        identity = source_identity(checkpoint)
        output.mkdir(parents=True, exist_ok=True)
        with Journal(output, identity) as journal:
            num_kept = _write_shards(checkpoint, shards, output, journal, device, reporter)
            _copy_others(model, output)
            if (model / INDEX).is_file():
                _write_json(output / INDEX, _index(shards))
            _write_json(output / CONFIG, quantised_config(dict(fields.values), checkpoint))
            journal.remove()
    reporter.say("done", num_shards_kept=num_kept, complete=False)


def _write_shards(
    checkpoint: Checkpoint,
    shards: Sequence[Shard],
    output: Path,
    journal: Journal,
    device: torch.device,
    reporter: Reporter,
) -> int:
    """How many were there already."""
    sizes = {shard.name: _source_bytes(checkpoint, shard) for shard in shards}
    reporter.say(
        "plan",
        num_bytes=sum(sizes.values()),
        num_bytes_output=sum(shard.num_bytes for shard in shards),
        num_shards=len(shards),
        num_matrices=sum(len(shard.quantised) for shard in shards),
    )
    left = []
    for shard in shards:
        if journal.is_finished(shard):
            reporter.progress(sizes[shard.name])
            reporter.say("kept", shard=shard.name)
        else:
            left.append(shard)
    _check_room(output, sum(shard.num_bytes for shard in left))
    for shard in left:
        reporter.say("shard", shard=shard.name)
        journal.add(shard, write_shard(checkpoint, shard, output, device, reporter.progress))
        checkpoint.close()
    return len(shards) - len(left)


def _source_bytes(checkpoint: Checkpoint, shard: Shard) -> int:
    copied = sum(tensor.num_bytes for tensor in shard.copied)
    return copied + sum(checkpoint.num_bytes(name) for name in shard.quantised)


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


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {text}: {error}") from error
    return device


if __name__ == "__main__":
    sys.exit(main())
