import pytest

from core.printable import check_printable, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("decode-0", "decode-0"),
        ("\u89e3\u7801 0", "\u89e3\u7801 0"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nrejected: b\r\t", r"a\nrejected: b\r\t"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("a\u202eb\u2066\u200b", r"a\u202eb\u2066\u200b"),  # turn the direction; take no room
        ("\u2028\u2029\x85", r"\u2028\u2029\x85"),  # ends of lines
        ("\ud800", r"\ud800"),
    ],
)
def test_what_is_obeyed_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert shown.isprintable()
    if text == shown:
        assert check_printable(text) == text
    else:
        with pytest.raises(ValueError, match="cannot be printed"):
            check_printable(text)
