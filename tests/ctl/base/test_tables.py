"""Tables say what they are given."""

from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from ctl.base.output import make_console
from ctl.base.tables import make_table


@pytest.mark.parametrize(
    "text", ["[fd00::5]:9000", "[errno 3] no route", "a [/b] c", "[bold]b[/]", "[1, 2]"]
)
def test_texts_are_shown_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table("process", text)
    table.add_row("prefill-0", text)
    table.add_row(Text("green", "green"), None)
    make_console().print(table)
    title, row, styled = capsys.readouterr().out.splitlines()
    assert title.split(maxsplit=1)[1].rstrip() == text
    assert row.split(maxsplit=1)[1].rstrip() == text
    assert styled.strip() == "green"


def test_what_is_wider_than_the_terminal() -> None:
    table = make_table("setting", "value", fold="value")
    value = "127.0.0.1:9000," * 10
    table.add_row("prefill", value)
    shown = StringIO()
    Console(file=shown, width=40, highlight=False).print(table)
    pieces = [line.removeprefix("prefill").strip() for line in shown.getvalue().splitlines()[1:]]
    assert "".join(pieces) == value


def test_lines_are_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table("worker", "address")
    table.add_row("decode-0", "a" * 500)
    make_console().print(table)
    assert capsys.readouterr().out.splitlines()[1] == f"decode-0  {'a' * 500}"
