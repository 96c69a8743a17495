"""Files that hold one secret word."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def read_token(file: Path) -> str:
    """The word in the file. Raises ValueError."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise ValueError(f"{file} must hold one word")
    return token


def _check(file: Path) -> Path:
    file = file.expanduser()
    read_token(file)
    return file


# A setting that names such a file.
TokenFile = Annotated[Path, AfterValidator(_check)]
