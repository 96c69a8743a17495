"""Texts of others, such as names: what may be shown of them, and what may be a name."""

MAX_NAME_CHARACTERS = 128


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal would obey or that would make a line of its
    own: control characters, line ends, marks that turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def check_name(text: str) -> str:
    """`text`, where it may be a process's name, address, epoch or version. Raises ValueError."""
    if len(text) > MAX_NAME_CHARACTERS:
        raise ValueError(f"is longer than {MAX_NAME_CHARACTERS} characters")
    if not text.isprintable():
        raise ValueError(f"has characters that cannot be printed: {printable(text)!r}")
    return text
