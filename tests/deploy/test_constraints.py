"""deploy/constraints*.txt: what each variant of the image may install."""

import importlib.util

import pytest
from packaging.utils import canonicalize_name

from tests.deploy.wheel import ROOT

spec = importlib.util.spec_from_file_location("pin", ROOT / "scripts/pin_dependencies.py")
assert spec is not None
assert spec.loader is not None
pin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pin)


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "deploy" / name).read_text().split("\n") if "==" in line]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize("name", pin.VARIANTS)
def test_all_that_is_asked_for_is_pinned_to_a_version_that_the_project_takes(name: str) -> None:
    pinned = pins(name)
    for requirement in pin.direct_requirements(pin.VARIANTS[name]):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}, but {version} is pinned"


def test_the_variants_differ_in_what_the_extra_brings_alone() -> None:
    cpu, cuda = pins("constraints.txt"), pins("constraints-cuda.txt")
    own = {canonicalize_name(each.name) for each in pin.of_extras(["gpu"])}
    assert own <= cuda.keys()
    assert cpu.keys() <= cuda.keys()
    others = {name for name in cuda if cpu.get(name) != cuda[name]} - own
    assert all(name.startswith("nvidia-") for name in others), others


def test_every_pin_of_the_extra_is_exact() -> None:
    """`ctl doctor` compares with them."""
    for requirement in pin.of_extras(["gpu"]):
        assert [each.operator for each in requirement.specifier] == ["=="], requirement
