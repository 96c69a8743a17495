"""Tokens as bytes, against the tokenizers library."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from core.errors import CheckpointError
from gateway.text.tokenizer import Tokenizer
from tests.gateway.model_folder import BOS, BOS_ID, EOS, THINK, make_model_folder, make_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path)


async def test_every_token_is_spelled_as_it_decodes(folder: Path) -> None:
    library, ours = make_tokenizer(), Tokenizer.load(folder)
    for token_id in range(library.get_vocab_size()):
        expected = library.decode([token_id], skip_special_tokens=False)
        assert ours.spelled_bytes(token_id).decode("utf-8", "replace") == expected
        shown = library.decode([token_id], skip_special_tokens=True)
        assert ours.shown_bytes(token_id).decode("utf-8", "replace") == shown
    assert sorted(ours.spelled_bytes(token_id) for token_id in range(4, 260)) == [
        bytes([byte]) for byte in range(256)
    ]


async def test_unknown_ids_are_nothing(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.shown_bytes(299) == tokenizer.spelled_bytes(299) == b""


async def test_the_first_token_is_put_in_front_once(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    plain = make_tokenizer().encode("the end").ids
    assert await tokenizer.encode("the end", add_special_tokens=True) == [BOS_ID, *plain]
    assert await tokenizer.encode(f"{BOS}the end", add_special_tokens=True) == [BOS_ID, *plain]
    assert await tokenizer.encode("the end", add_special_tokens=False) == plain


async def test_long_texts_are_encoded_alike(folder: Path) -> None:
    text = "the sun and the rain, " * 500
    tokens = await Tokenizer.load(folder).encode(text, add_special_tokens=False)
    assert tokens == make_tokenizer().encode(text).ids


def test_special_tokens_for_templates(folder: Path) -> None:
    assert Tokenizer.load(folder).special_tokens == {"bos_token": BOS, "eos_token": EOS}


def test_works_without_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens == {}
    assert tokenizer.shown_bytes(make_tokenizer().token_to_id(THINK[0])) == b"<think>"


def test_truncation_in_the_file_is_ignored(folder: Path) -> None:
    library = make_tokenizer()
    library.enable_truncation(3)
    library.enable_padding(length=5)
    library.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder)._encode("abcdefgh", False)) == 8


def test_other_kinds_are_refused(folder: Path) -> None:
    Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="ByteLevel"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_broken_files_are_named(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


def test_wrong_types_in_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": "yes"}))
    with pytest.raises(CheckpointError, match="add_bos_token"):
        Tokenizer.load(folder)
