"""Loads a rank's model, and says how far it has come.

source = open_weights(settings, device)      # a checkpoint, or what stands in for one
model = load_model(source, settings, device=device, dtype=dtype, experts=experts)
"""

import time
from dataclasses import replace

import torch

from core.log import get_logger
from engine.process.settings import WorkerSettings
from ep.dispatch.expert_shard import ExpertShard
from model.batch import AttentionForm
from model.config import Fields, ModelConfig
from model.deepseek import DeepseekV3
from model.weights.checkpoint import Checkpoint
from model.weights.dummy_checkpoint import DummyCheckpoint

log = get_logger("engine.model_loading")

# Between two lines about the progress.
REPORT_SECONDS = 5.0


def model_config(settings: WorkerSettings, form: AttentionForm) -> ModelConfig:
    """Of the folder, and what a rank makes of its MTP layer. CheckpointError as `from_folder`."""
    config = ModelConfig.from_folder(settings.model)
    if not settings.drafts_by_mtp:
        return config
    return replace(config, mtp="whole" if form is AttentionForm.ABSORBED else "kv")


def open_weights(settings: WorkerSettings, device: torch.device) -> Checkpoint:
    """CheckpointError for a folder that has none, unless none are asked for."""
    if settings.load_format == "dummy":
        return DummyCheckpoint(settings.model, device)
    return Checkpoint(settings.model, device)


def weights_revision(settings: WorkerSettings) -> str | None:
    """For fingerprints, of weights that are not the folder's: those made up are the same for one
    kind of device and format. None: the folder's own."""
    if settings.load_format != "dummy":
        return None
    quantization = Fields.read(settings.model / "config.json").values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else ""
    return f"dummy {settings.device.partition(':')[0]} {method}"


def load_model(
    source: Checkpoint,
    settings: WorkerSettings,
    config: ModelConfig,
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    experts: ExpertShard,
    form: AttentionForm,
) -> DeepseekV3:
    """Closes `source`."""
    progress = LoadProgress(source, rank, config.num_layers)
    model = DeepseekV3.load(
        settings.model,
        device=device,
        dtype=dtype,
        config=config,
        experts=experts,
        form=form,
        source=source,
        on_layer=progress.layer,
    )
    torch.cuda.empty_cache()  # what tensors were read into, for others than torch
    return model


class LoadProgress:
    """A line every few seconds, and one at the end."""

    def __init__(self, source: Checkpoint, rank: int, num_layers: int) -> None:
        self._source = source
        self._rank = rank
        self._num_layers = num_layers
        self._began = self._said = time.monotonic()

    def layer(self, layer: int) -> None:
        """Layer `layer` is loaded."""
        now = time.monotonic()
        if now - self._said < REPORT_SECONDS and layer + 1 < self._num_layers:
            return
        self._said = now
        seconds = now - self._began
        gigabytes = self._source.bytes_read / 1e9
        planned = self._source.bytes_planned / 1e9
        log.info(
            "weights loaded",
            rank=self._rank,
            layers=f"{layer + 1}/{self._num_layers}",
            gigabytes=round(gigabytes, 2),
            gigabytes_per_second=round(gigabytes / max(seconds, 1e-3), 2),
            seconds=round(seconds, 1),
            seconds_left=round(seconds * max(0.0, planned / max(gigabytes, 1e-3) - 1)),
        )
