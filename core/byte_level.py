"""The alphabet of byte-level BPE, in which tokenizer.json writes tokens."""


def _byte_of_character() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + position): byte for position, byte in enumerate(others)
    }


BYTE_OF_CHARACTER = _byte_of_character()
