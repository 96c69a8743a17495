"""Text from tokens against the tokenizers library decoding everything at once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output.output_text import ChoiceDelta, OutputText
from gateway.text.tokenizer import Tokenizer
from proto.generate_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    Token,
    TokenLogprob,
)
from tests.gateway.model_folder import EOS_ID, make_tokenizer
from tests.gateway.text.test_stop_strings import first_stop

LIBRARY = make_tokenizer()
TOKENIZER = Tokenizer(make_tokenizer(), special_tokens={}, adds_bos=False)
NUM_TOKENS = LIBRARY.get_vocab_size()

IDS = st.lists(st.integers(0, NUM_TOKENS + 5), max_size=30)  # some that do not exist
TEXTS = st.text(st.sampled_from("ab é日🙂\u0301<"), max_size=20)
SIZES = st.lists(st.integers(1, 5), min_size=30, max_size=30)


def produce(
    token_ids: list[int], sizes: list[int], finish: int, **options: Any
) -> tuple[list[ChoiceDelta], OutputText]:
    """Feeds the tokens in messages of the given sizes; the last one has the finish reason."""
    output = OutputText(TOKENIZER, **{"stops": (), "min_tokens": 0, "logprobs": False} | options)
    tokens = [Token(token_id=i, logprob=-float(n)) for n, i in enumerate(token_ids)]
    for token in tokens:
        token.top_logprobs.append(TokenLogprob(token_id=token.token_id, logprob=token.logprob))
    deltas: list[ChoiceDelta] = []
    messages = []
    while tokens:
        size = sizes[len(messages)]
        messages.append(tokens[:size])
        tokens = tokens[size:]
    for message in messages or [[]]:
        is_last = not messages or message is messages[-1]
        reason = finish if is_last else FINISH_REASON_UNSPECIFIED
        deltas.append(output.feed(message, reason))  # type: ignore[arg-type]
        if output.finish_reason is not None:
            break
    return deltas, output


@given(IDS, SIZES)
def test_any_tokens_in_any_messages(token_ids: list[int], sizes: list[int]) -> None:
    deltas, output = produce(token_ids, sizes, FINISH_REASON_LENGTH)
    assert "".join(delta.text for delta in deltas) == LIBRARY.decode(token_ids)
    assert output.num_tokens == len(token_ids)
    assert deltas[-1].finish_reason == "length"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


@given(TEXTS, SIZES)
def test_no_half_characters(text: str, sizes: list[int]) -> None:
    token_ids = LIBRARY.encode(text).ids
    if len(token_ids) > 60:
        token_ids = token_ids[:60]
    deltas, _ = produce(token_ids, sizes * 3, FINISH_REASON_LENGTH)
    for delta in deltas[:-1]:
        assert "\ufffd" not in delta.text


@given(
    TEXTS,
    st.lists(st.text("ab é日", min_size=1, max_size=4), max_size=3),
    SIZES,
    st.integers(0, 8),
)
def test_stops(text: str, stops: list[str], sizes: list[int], min_tokens: int) -> None:
    token_ids = LIBRARY.encode(text).ids
    deltas, output = produce(
        token_ids, sizes * 3, FINISH_REASON_LENGTH, stops=stops, min_tokens=min_tokens
    )
    free = LIBRARY.decode(token_ids[:min_tokens]).rstrip("\ufffd")
    found = first_stop(text[len(free) :], stops)
    shown = "".join(delta.text for delta in deltas)
    if found is None:
        assert (shown, output.finish_reason) == (text, "length")
    else:
        assert (shown, output.finish_reason) == (text[: len(free) + found], "stop")
        # Counted up to the token that completed it, whatever else its message brought.
        exact, alone = produce(
            token_ids, [1] * 99, FINISH_REASON_LENGTH, stops=stops, min_tokens=min_tokens
        )
        assert output.num_tokens == alone.num_tokens
        assert shown == "".join(delta.text for delta in exact)


@given(IDS, SIZES, st.lists(st.text("abé", min_size=1, max_size=3), max_size=2))
def test_entries_do_not_depend_on_messages(
    token_ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    def entries(sizes: list[int]) -> list[Any]:
        deltas, _ = produce(token_ids, sizes, FINISH_REASON_LENGTH, stops=stops, logprobs=True)
        num_characters = 0
        for delta in deltas:
            num_characters += len(delta.text)
            # An entry is never shown before its token's text is.
            assert all(entry.offset <= num_characters for entry in delta.entries)
        return [entry for delta in deltas for entry in delta.entries]

    assert entries(sizes) == entries([1] * 30) == entries([30] * 30)


def test_the_stop_token_is_counted_but_not_shown() -> None:
    letter = LIBRARY.token_to_id("z")
    deltas, output = produce([letter, letter], [1] * 2, FINISH_REASON_STOP, logprobs=True)
    assert [delta.text for delta in deltas] == ["z", ""]
    assert [len(delta.entries) for delta in deltas] == [1, 0]
    assert (output.num_tokens, output.finish_reason) == (2, "stop")


def test_special_tokens_are_hidden_and_think_is_not() -> None:
    ids = LIBRARY.encode("<think>x</think>").ids
    deltas, _ = produce([0, *ids, 2, EOS_ID], [9], FINISH_REASON_STOP)
    assert deltas[0].text == "<think>x</think>"


def test_entries_are_cut_with_the_text() -> None:
    ids = LIBRARY.encode("one STOP").ids
    deltas, _ = produce(ids, [len(ids)], FINISH_REASON_LENGTH, stops=["STOP"], logprobs=True)
    (delta,) = deltas
    assert delta.text == "one "
    shown = b"".join(TOKENIZER.spelled_bytes(entry.token_id) for entry in delta.entries)
    assert shown == b"one "


def test_cost_is_linear_in_the_output() -> None:
    """Ten times the text takes about ten times the steps: no rescans of what is there."""
    letter = LIBRARY.token_to_id("a")
    lengths = []
    for num_tokens in (1000, 10_000):
        output = OutputText(TOKENIZER, stops=["aab"], min_tokens=0, logprobs=False)
        most_held = 0
        for _ in range(num_tokens):
            output.feed([Token(token_id=letter)], FINISH_REASON_UNSPECIFIED)
            most_held = max(most_held, len(output._held))
        lengths.append(most_held)
    assert lengths == [2, 2]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_off_by_the_end(cut: int) -> None:
    ids = LIBRARY.encode("🙂").ids[:cut]
    deltas, _ = produce(ids, [1] * 4, FINISH_REASON_LENGTH)
    assert [delta.text for delta in deltas] == [""] * (cut - 1) + [LIBRARY.decode(ids)]
