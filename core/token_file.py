"""Files that hold a secret word, or one a line."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def read_tokens(file: Path) -> tuple[str, ...]:
    """The words in the file, one a line, at least one. Raises ValueError."""
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    tokens = tuple(line.strip() for line in text.strip().split("\n"))
    for token in tokens:
        if not token or not token.isprintable() or " " in token:
            raise ValueError(f"{file} must hold one word a line")
    return tokens


def read_token(file: Path) -> str:
    """The only word in the file. Raises ValueError."""
    token, *others = read_tokens(file)
    if others:
        raise ValueError(f"{file} must hold one word")
    return token


def _check(file: Path) -> Path:
    file = file.expanduser()
    read_token(file)
    return file


def _check_lines(file: Path) -> Path:
    file = file.expanduser()
    read_tokens(file)
    return file


# Settings that name such files: of one word, and of one a line.
TokenFile = Annotated[Path, AfterValidator(_check)]
TokensFile = Annotated[Path, AfterValidator(_check_lines)]
