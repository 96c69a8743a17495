import inspect

import pytest

from core import errors
from core.errors import STATUS, EpserveError, InternalError

CLASSES = [
    cls
    for _name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, EpserveError) and not _name.startswith("_")
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_row_that_leads_back_to_it(cls: type[EpserveError]) -> None:
    row = STATUS[cls]
    assert cls("x").status is row
    back = EpserveError.from_status(row.grpc, "x", code=row.code)
    assert type(back) is (InternalError if cls is EpserveError else cls)


def test_subclasses_without_a_row_take_their_parents() -> None:
    class Narrower(errors.Overloaded):
        pass

    assert Narrower("x").status.http == 429


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("UNAVAILABLE", errors.Unavailable),
        ("RESOURCE_EXHAUSTED", errors.Overloaded),
        ("OUT_OF_RANGE", errors.InvalidRequest),
        ("UNKNOWN", errors.InternalError),
        ("NEW_STATUS_OF_TOMORROW", errors.InternalError),
    ],
)
def test_bare_statuses_have_a_meaning(name: str, expected: type[EpserveError]) -> None:
    assert type(EpserveError.from_status(name, "x")) is expected


def test_a_code_of_another_status_is_not_believed() -> None:
    error = EpserveError.from_status("UNAVAILABLE", "x", code="context_length_exceeded")
    assert type(error) is errors.Unavailable


def test_details_travel_and_unset_ones_keep_their_default() -> None:
    error = EpserveError.from_status("UNAVAILABLE", "x", failed_epoch="e", retry_after_seconds=7)
    assert (error.failed_epoch, error.retry_after_seconds) == ("e", 7)
    assert EpserveError.from_status("RESOURCE_EXHAUSTED", "x").retry_after_seconds == 1.0
    assert EpserveError.from_status("NOT_FOUND", "x").param == "model"


def test_a_checkpoint_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="missing"):
        raise errors.CheckpointError("missing tensor")
