from pathlib import Path

import pytest

from kernels.build.mkl_rows import STRICT, VARIABLE, ask_for_rows_by_themselves


@pytest.mark.parametrize(
    ("processor", "given", "want"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", {}, {VARIABLE: STRICT}),
        ("vendor_id\t: GenuineIntel\n", {VARIABLE: "AVX2"}, {VARIABLE: "AVX2"}),
        ("vendor_id\t: AuthenticAMD\n", {}, {}),
        ("CPU implementer\t: 0x41\n", {}, {}),
        (None, {}, {}),
    ],
)
def test_only_an_intel_processor_is_asked(
    tmp_path: Path, processor: str | None, given: dict[str, str], want: dict[str, str]
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if processor is not None:
        cpuinfo.write_text(processor)
    environment = dict(given)
    ask_for_rows_by_themselves(environment, cpuinfo)
    assert environment == want
