"""The demo model's tokenizer: byte-level BPE in which every digit is a token, with DeepSeek's
control tokens.

The files are those of the public DeepSeek checkpoints: `tokenizer.json` and
`tokenizer_config.json`, the latter with the chat template in it.
"""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from demo_model.training.corpus import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    PAD,
    THINK,
    USER,
    tokenizer_texts,
)

# Control tokens are hidden when text is decoded; the marks of turns and thinking are plain
# vocabulary, as in R1.
_CONTROL, _MARKS = (BOS, EOS, PAD), (USER, ASSISTANT, THINK, END_THINK)
_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Learn the merges from the folder's own text. Control tokens and marks get the first ids.

    Raises ValueError if `vocab_size` leaves no room for the 256 bytes and the control tokens.
    """
    if vocab_size < 256 + len(_CONTROL) + len(_MARKS):
        raise ValueError(f"vocab_size {vocab_size} is less than the bytes and control tokens need")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (*_CONTROL, *_MARKS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=5,
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(), trainer)
    tokenizer = _with_plain_marks(tokenizer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos_id)]
            ),
        ]
    )
    assert tokenizer.get_vocab_size() == vocab_size, (
        "the corpus is rich enough to fill the vocabulary"
    )
    return tokenizer


def _with_plain_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer makes every token that it is given special, so that decoding would hide the
    thinking too.
    """
    values = json.loads(tokenizer.to_str())
    for token in values["added_tokens"]:
        token["special"] = token["content"] in _CONTROL
    return Tokenizer.from_str(json.dumps(values))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_position: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": (Path(__file__).parent / "chat_template.jinja").read_text(
            encoding="utf-8"
        ),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
