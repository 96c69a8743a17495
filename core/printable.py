"""What may be shown of texts that others have written, such as names."""


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal would obey or that would make a line of its
    own: control characters, line ends, marks that turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def check_printable(text: str) -> str:
    """`text`, where all of it can be shown. Raises ValueError."""
    if not text.isprintable():
        raise ValueError(f"{printable(text)} has letters that cannot be printed")
    return text
