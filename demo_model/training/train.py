"""Train the demo model: `python -m demo_model.training.train --output FOLDER`.

Writes a whole checkpoint folder every minute, so that a run that is cut off still leaves a model,
and at the end `master.safetensors`, the exact weights, for comparison with what FP8 keeps of them.
"""

import argparse
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import DeepseekV3Config

from demo_model.training.batches import Batch, BatchSource
from demo_model.training.block_fp8 import rounded
from demo_model.training.checkpoint import public_weights, quantised_parameters, save_checkpoint
from demo_model.training.network import Network, config_values, use_dense_experts
from demo_model.training.settings import CHECKPOINT_PATH, SETTINGS_PATH, Settings, Training
from demo_model.training.tokenizer import save_tokenizer, train_tokenizer

_SAVE_EVERY_SECONDS = 60.0
_REPORT_EVERY_STEPS = 100


class Trainer:
    """Network, optimiser and schedule; one call of `step` is one batch."""

    def __init__(self, settings: Settings, device: str) -> None:
        torch.manual_seed(settings.training.seed)
        self.settings, self.device = settings, device
        self.network = Network(DeepseekV3Config(**config_values(settings.sizes))).to(device)
        use_dense_experts(self.network)
        self._quantised = quantised_parameters(self.network)
        self._optimiser = torch.optim.AdamW(
            _parameter_groups(self.network, settings.training.weight_decay),
            lr=settings.training.learning_rate,
            betas=(0.9, 0.95),
            fused=device.startswith("cuda"),
        )
        self.num_steps = 0

    def step(self, batch: Batch, progress: float) -> torch.Tensor:
        """Train on one batch.

        `progress` is the share of the run that is over. Returns [2] losses on the device.
        """
        training = self.settings.training
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(training, self.num_steps, progress)
        tensors = [
            torch.from_numpy(array).to(self.device, non_blocking=True) for array in _widen(batch)
        ]
        quantised = self._quantised if progress >= training.quantise_from else []
        with rounded(quantised):
            with torch.autocast(self.device.split(":")[0], torch.bfloat16):
                main, ahead = self.network.losses(*tensors)
            (main + training.mtp_weight * ahead).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), training.clip_norm)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._balance(training.bias_rate if progress < training.bias_until else 0.0)
        self.num_steps += 1
        return torch.stack([main.detach(), ahead.detach()])

    @torch.no_grad()
    def _balance(self, rate: float) -> None:
        """Move each expert's bias a fixed step against its load error, as DeepSeek-V3 does."""
        for layer in self.network.moe_layers():
            load = layer.experts.load
            error = load.float().mean() - load
            layer.gate.e_score_correction_bias += rate * error.sign()
            layer.last_load = load.clone()
            load.zero_()

    def imbalance(self) -> float:
        """Highest expert load over the mean, of the last step, worst layer."""
        return max(
            float(layer.last_load.max() / layer.last_load.float().mean())
            for layer in self.network.moe_layers()
        )


def learning_rate(training: Training, step: int, progress: float) -> float:
    """Linear warm-up over steps, then a cosine over the whole run."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    rate = (
        training.final_learning_rate
        + (training.learning_rate - training.final_learning_rate) * cosine
    )
    return rate * min(1.0, (step + 1) / training.warmup_steps)


def train(settings: Settings, output: Path, device: str, num_processes: int) -> None:
    """Run the whole training and write `output`."""
    training = settings.training
    output.mkdir(parents=True, exist_ok=True)
    tokenizer_path = _write_tokenizer(settings, output)
    with BatchSource(tokenizer_path, training, num_processes) as source:
        trainer = Trainer(settings, device)
        num_parameters = sum(parameter.numel() for parameter in trainer.network.parameters())
        _say(f"{num_parameters / 1e6:.2f} M parameters with the MTP layer, on {device}")
        start = last_save = time.monotonic()
        progress = num_tokens = 0.0
        while progress < 1.0:
            batch = source.next()
            losses = trainer.step(batch, progress)
            num_tokens += float((batch.segments > 0).sum())
            if trainer.num_steps % _REPORT_EVERY_STEPS == 1:
                _report(trainer, losses, num_tokens, time.monotonic() - start)
            now = time.monotonic()
            progress = max((now - start) / training.seconds, trainer.num_steps / training.max_steps)
            if now - last_save > _SAVE_EVERY_SECONDS or progress >= 1.0:
                save_checkpoint(trainer.network, settings.sizes, output)
                last_save = now
        _report(trainer, losses, num_tokens, time.monotonic() - start)
    exact = {
        name: tensor.cpu().contiguous() for name, tensor in public_weights(trainer.network).items()
    }
    save_file(
        {name: tensor.clone() for name, tensor in exact.items()}, output / "master.safetensors"
    )
    record = {
        "steps": trainer.num_steps,
        "tokens": int(num_tokens),
        "settings": dataclasses.asdict(settings),
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _parameter_groups(network: Network, weight_decay: float) -> list[dict[str, object]]:
    matrices = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _write_tokenizer(settings: Settings, output: Path) -> Path:
    """Put the tokenizer that ships into `output`, or a new one if the vocabulary differs."""
    shipped = CHECKPOINT_PATH / "tokenizer.json"
    vocab_size = settings.sizes.vocab_size
    tokenizer = Tokenizer.from_file(str(shipped)) if shipped.exists() else None
    if tokenizer is None or tokenizer.get_vocab_size() != vocab_size:
        tokenizer = train_tokenizer(vocab_size)
    save_tokenizer(tokenizer, output, settings.sizes.max_position_embeddings)
    return output / "tokenizer.json"


def _widen(batch: Batch) -> tuple[npt.NDArray[np.generic], ...]:
    return batch.tokens.astype("int64"), batch.segments.astype("int64"), batch.learned


def _report(trainer: Trainer, losses: torch.Tensor, num_tokens: float, seconds: float) -> None:
    main, ahead = losses.tolist()
    _say(
        f"step {trainer.num_steps:6d} {seconds:6.1f} s loss {main:.4f} mtp {ahead:.4f} "
        f"load max/mean {trainer.imbalance():.2f} {num_tokens / max(seconds, 1e-9) / 1e6:.2f} "
        "Mtokens/s"
    )


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--settings", type=Path, default=SETTINGS_PATH)
    parser.add_argument("--seconds", type=float, help="instead of what the settings say")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    settings = Settings.load(arguments.settings)
    if arguments.seconds:
        training = dataclasses.replace(settings.training, seconds=arguments.seconds)
        settings = dataclasses.replace(settings, training=training)
    train(settings, arguments.output, arguments.device, arguments.processes)


if __name__ == "__main__":
    main()
