"""Settings of a worker: what is refused, and that a rank gets what its front was told."""

from pathlib import Path

import pytest

from engine.process.settings import WorkerSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_rank_reads_what_the_front_was_told(folder: Path) -> None:
    flags = ["--model", str(folder), "--ranks", "3", "--device", "cuda:2", "--page-tokens", "16"]
    settings = WorkerSettings.parse([*flags, "--nodes", "2", "--rendezvous", "10.0.0.1:29"])
    assert WorkerSettings.model_validate(settings.model_dump(mode="json")) == settings
    assert settings.model_name == "some-model"
    assert settings.group_size == 6
    assert [settings.device_of(rank) for rank in range(3)] == ["cuda:2", "cuda:3", "cuda:4"]
    assert settings.dtype_name == "bfloat16"


def test_defaults_are_for_a_machine_without_gpus(folder: Path) -> None:
    settings = WorkerSettings(model=folder, served_model_name="other")
    assert settings.model_name == "other"
    assert settings.dtype_name == "float32"
    assert settings.device_of(3) == "cpu"
    assert settings.step_tokens == 512
    assert WorkerSettings(model=folder, device="cuda").step_tokens == 2048
    assert WorkerSettings(model=folder, page_tokens=1024).step_tokens == 1024
    assert WorkerSettings(model=folder, chunk_tokens=100).step_tokens == 100


def test_the_size_of_the_model_says_how_long_a_start_may_take(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(25 * 10**9)  # sparse
    assert WorkerSettings(model=folder).start_seconds == 600 + 100
    assert WorkerSettings(model=folder, load_format="dummy").start_seconds == 600
    assert WorkerSettings(model=folder, start_timeout_seconds=5).start_seconds == 5


def test_what_drafts(folder: Path) -> None:
    drafting = WorkerSettings(model=folder, speculative_tokens=3, max_running=64)
    assert (drafting.drafts_by_mtp, drafting.drafts_by_lookup) == (True, False)
    assert drafting.running_tokens == 4 * 64
    looking = WorkerSettings(model=folder, speculative_tokens=3, speculative_method="ngram")
    assert (looking.drafts_by_mtp, looking.drafts_by_lookup) == (False, True)
    off = WorkerSettings(model=folder, speculative_method="ngram", max_running=64)
    assert not off.drafts_by_lookup
    assert off.running_tokens == 64
    # So many at once draft nothing.
    many = WorkerSettings(model=folder, speculative_tokens=1, max_running=1000)
    assert many.running_tokens == 1000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere"], "no model folder"),
        (["--ranks", "0"], "--ranks"),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda:x"], "--device"),
        (["--dtype", "float8"], "--dtype"),
        (["--node-rank", "1"], "node-rank 1 is not below nodes 1"),
        (["--nodes", "2"], "rendezvous"),
        (["--rendezvous", "nonsense"], "--rendezvous"),
        (["--chunk-tokens", "8"], "less than a page"),
        (
            ["--speculative-tokens", "2", "--overlap-schedule"],
            "no overlap-schedule with speculative-tokens 2",
        ),
        # A round of a migration would outlast what ranks wait for each other.
        (["--rebalance-bytes-per-second", "17000"], "--rebalance-bytes-per-second"),
    ],
)
def test_wrong_values_end_with_status_2_and_a_reason(
    folder: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        WorkerSettings.parse(["--model", str(folder), *flags])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
