import pytest

from core.request_ids import call_id, choice_id, choice_of, is_part_of

REQUEST = "chatcmpl-0123456789abcdef01234567"


@pytest.mark.parametrize("asked", [REQUEST, f"{REQUEST}-3", f"{REQUEST}-3.2"])
def test_a_call_is_part_of_its_choice_and_its_request(asked: str) -> None:
    call = call_id(choice_id(REQUEST, 3), 2)
    assert call == f"{REQUEST}-3.2"
    assert is_part_of(call, asked)
    assert choice_of(call) == f"{REQUEST}-3"


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        (f"{REQUEST}-31", f"{REQUEST}-3"),  # another choice
        (f"{REQUEST}-3.21", f"{REQUEST}-3.2"),
        (REQUEST, REQUEST[:-1]),
        (f"{REQUEST}-3", f"{REQUEST}-3.1"),
        ("chatcmpl-012345678901234567890123-0", "chatcmpl"),
        (f"{REQUEST}-3.2.1", REQUEST),
        ("", REQUEST),
    ],
)
def test_beginning_alike_is_not_enough(part: str, asked: str) -> None:
    assert not is_part_of(part, asked)


def test_first_calls_have_the_choices_own_id() -> None:
    assert call_id("a-0", 0) == choice_of("a-0") == "a-0"
