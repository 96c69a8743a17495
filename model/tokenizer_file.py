"""Whether a folder has a tokenizer that is read, and what to do if not. Torch-free."""

import base64
import binascii
from pathlib import Path

NAME = "tokenizer.json"


def tokenizer_problem(folder: Path) -> str:
    """Why the folder's tokenizer cannot be read, and what to do; "" if it has tokenizer.json."""
    if (folder / NAME).is_file():
        return ""
    others = (folder / "tiktoken.model", *sorted(folder.glob("*.tiktoken")))
    for path in (*others, folder / "tokenizer.model"):
        if path.is_file() and _is_tiktoken(path):
            return (
                f"it has no {NAME}, but {path.name}: have transformers make one of it, with its "
                "TikTokenConverter (docs/install.md, Tokenizers)"
            )
        if path.is_file():
            return (
                f"it has no {NAME}, but {path.name} of sentencepiece, which is not supported: take "
                f"{NAME} from a checkpoint of this model whose tokenizer is byte-level BPE"
            )
    return f"it has no {NAME}: copy it from the checkpoint that this one was made of"


def _is_tiktoken(path: Path) -> bool:
    """A line a token: its bytes in base64, and its rank."""
    with path.open("rb") as stream:
        token, _, rank = stream.readline(1024).partition(b" ")
    try:
        base64.b64decode(token, validate=True)
    except binascii.Error:
        return False
    return rank.strip().isdigit()
