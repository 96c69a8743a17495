import json

import pytest
from pydantic import Field, ValidationError

from core.settings import HostPorts, ProcessSettings


class ExampleSettings(ProcessSettings):
    """An example."""

    peers: HostPorts = Field((), description="addresses")
    num_things: int = Field(3, ge=1, description="how many")
    fast: bool = Field(False, description="or slow")
    careful: bool | None = Field(None, description="or not; None: as it comes")


def test_defaults() -> None:
    settings = ExampleSettings.parse([])
    assert (settings.listen, settings.metrics_port, settings.peers) == ("127.0.0.1:0", -1, ())


def test_flags_are_the_fields_in_kebab_case() -> None:
    settings = ExampleSettings.parse(
        ["--num-things", "5", "--fast", "--peers", "a:1, [::1]:2", "--peers=c:3", "--name=x"]
        + ["--no-careful"]
    )
    assert (settings.num_things, settings.fast, settings.name) == (5, True, "x")
    assert settings.careful is False
    assert settings.peers == ("a:1", "[::1]:2", "c:3")


def test_environment_is_below_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPSERVE_NUM_THINGS", "7")
    monkeypatch.setenv("EPSERVE_PEERS", "a:1,b:2")
    # What Kubernetes injects for a service named like us must not disturb.
    monkeypatch.setenv("EPSERVE_SERVICE_HOST", "10.0.0.1")
    settings = ExampleSettings.parse(["--peers", "c:3"])
    assert (settings.num_things, settings.peers) == (7, ("c:3",))


def test_address_that_others_reach_a_process_by() -> None:
    argv = ["--listen", "0.0.0.0:0"]
    assert ExampleSettings.parse(argv).address_at(7) == "0.0.0.0:7"
    assert ExampleSettings.parse([*argv, "--advertise", "10.0.0.1"]).address_at(7) == "10.0.0.1:7"
    assert ExampleSettings.parse([*argv, "--advertise", "fd00::1"]).address_at(7) == "[fd00::1]:7"


def test_secrets_are_not_shown() -> None:
    class SecretiveSettings(ExampleSettings):
        keys: str = Field("", repr=False)

    settings = SecretiveSettings.parse(["--keys", "sesame", "--peers", "a:1"])
    shown = json.loads(settings.public_json())
    assert set(shown) == set(SecretiveSettings.model_fields) - {"keys"}
    assert shown["peers"] == ["a:1"]
    assert "sesame" not in settings.public_json()


@pytest.mark.parametrize("argv", [[], ["--num-things", "1", "--keys", "sesame"]])
def test_complaints_tell_no_secrets(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class SecretiveSettings(ExampleSettings):
        num_things: int
        keys: str = Field("", repr=False, max_length=5)

    monkeypatch.setenv("EPSERVE_KEYS", "sesam")
    with pytest.raises(SystemExit):
        SecretiveSettings.parse(argv)
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: --")
    assert "sesam" not in complaint


def test_settings_do_not_change() -> None:
    settings = ExampleSettings.parse([])
    with pytest.raises(ValidationError, match="frozen"):
        settings.num_things = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--num-things", "0"], "--num-things: Input should be greater than or equal to 1"),
        (["--num-things", "x"], "--num-things: Input should be a valid integer"),
        (["--peers", "a"], "--peers: 'a' is not host:port"),
        (["--advertise", "a host"], "--advertise: String should match pattern"),
        (["--listen", "h:99999"], "--listen: 'h:99999': the port must be"),
        (["--log-format", "xml"], "--log-format"),
        (["--num-thing=3"], "error: unknown flag --num-thing; the nearest one is --num-things\n"),
        (["--no-fst"], "unknown flag --no-fst; the nearest one is --no-fast"),
        (["--no-peers"], "unknown flag --no-peers"),
        (["stray"], "unrecognized arguments: stray"),
        (["--name"], "--name: expected one argument"),
    ],
)
def test_wrong_flags_exit_with_2_and_name_the_flag(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ExampleSettings.parse(argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_help_tells_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ExampleSettings.parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in ExampleSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description
