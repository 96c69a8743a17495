"""Flags on a command line, and back."""

from ctl.base.flags import flag_arguments, parse_arguments


def test_flags_are_read_back() -> None:
    flags = {"name": "decode-0", "cuda-graph": "false", "metrics-port": "-1", "overlap": "true"}
    assert parse_arguments(["python", "-m", "decode_worker", *flag_arguments(flags)]) == flags
    assert parse_arguments([]) == {}
