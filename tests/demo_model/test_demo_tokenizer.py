"""The tokenizer that ships, and its chat template."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo_model.training.corpus import ASSISTANT, BOS, EOS, PAD, USER, sample_conversation
from demo_model.training.network import BOS_ID, EOS_ID, PAD_ID
from demo_model.training.settings import CHECKPOINT_PATH, Settings
from demo_model.training.tokenizer import train_tokenizer

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT_PATH / "tokenizer.json"))


@pytest.fixture(scope="module")
def published() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHECKPOINT_PATH)


def test_vocabulary_and_control_tokens() -> None:
    assert TOKENIZER.get_vocab_size() == Settings.load().sizes.vocab_size <= 1024
    assert [TOKENIZER.token_to_id(text) for text in (BOS, EOS, PAD)] == [BOS_ID, EOS_ID, PAD_ID]
    assert TOKENIZER.encode("a").ids[0] == BOS_ID


@given(st.integers(0, 10**12))
@settings(max_examples=50, deadline=None)
def test_each_digit_is_a_token(number: int) -> None:
    tokens = TOKENIZER.encode(f"x{number} {number}+", add_special_tokens=False).tokens
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list(str(number)) * 2


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_thinking_is_shown_and_control_tokens_are_hidden() -> None:
    ids = TOKENIZER.encode("<think>\n1\n</think>\n\n1" + EOS).ids
    assert TOKENIZER.decode(ids) == "<think>\n1\n</think>\n\n1"


def test_template_makes_the_prompts_of_training(published: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    for _ in range(300):
        conversation = sample_conversation(rng)
        text = published.apply_chat_template(
            conversation.messages(), tokenize=False, add_generation_prompt=True
        )
        assert text == conversation.prompt()


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "hi"}], f"{BOS}{USER}hi"),
        (
            [{"role": "system", "content": "a"}, {"role": "system", "content": "b"},
             {"role": "user", "content": "hi"}],
            f"{BOS}a\n\nb{USER}hi",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "1"},
                                          {"type": "text", "text": "+2"}]}],
            f"{BOS}{USER}1+2",
        ),
        (
            [{"role": "user", "content": "q"},
             {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"}],
            f"{BOS}{USER}q{ASSISTANT}y{EOS}",
        ),
    ],
)  # fmt: skip
def test_template(
    published: PreTrainedTokenizerBase, messages: list[dict[str, object]], text: str
) -> None:
    assert published.apply_chat_template(messages, tokenize=False) == text


def test_transformers_reads_the_same_tokens(published: PreTrainedTokenizerBase) -> None:
    text = "What is 37 + 48? ça 你好"
    assert published(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert (published.bos_token_id, published.eos_token_id) == (BOS_ID, EOS_ID)


def test_shipped_tokenizer_is_what_the_folder_trains() -> None:
    trained = json.loads(train_tokenizer(TOKENIZER.get_vocab_size()).to_str())
    shipped = json.loads(TOKENIZER.to_str())
    assert trained == shipped


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 100"):
        train_tokenizer(100)
