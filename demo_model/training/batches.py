"""Training batches: conversations, tokenised and packed into rows by processes beside the trainer.

A batch is three arrays [rows, row length]: token ids, the number of the conversation that a token
belongs to (from 1 in each row, 0 is padding; attention never crosses a number), and whether the
token is learned.
"""

import multiprocessing
import os
import queue
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_model.training.corpus import (
    sample_conversation,
    sample_dense_conversation,
    sample_long_conversation,
)
from demo_model.training.settings import Training

_LONG_ROW_TOKENS = 4096
_FILL = 0.95  # of the row capacity that is drawn; the rest is lost to packing

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

Document = tuple[list[int], list[bool]]  # token ids, is each learned


@dataclass(frozen=True, slots=True)
class Batch:
    """One training step's tokens: [rows, row length] int16, uint16 and bool."""

    tokens: npt.NDArray[np.int16]
    segments: npt.NDArray[np.uint16]
    learned: npt.NDArray[np.bool_]


def pack(documents: list[Document], num_rows: int, row_tokens: int) -> Batch:
    """First-fit decreasing; documents that find no room are left out."""
    tokens = np.zeros((num_rows, row_tokens), np.int16)
    segments = np.zeros((num_rows, row_tokens), np.uint16)
    learned = np.zeros((num_rows, row_tokens), np.bool_)
    used, counts = [0] * num_rows, [0] * num_rows
    first_open = 0
    shortest = min((len(ids) for ids, _ in documents), default=0)
    for ids, marks in sorted(documents, key=lambda document: -len(document[0])):
        row = next(
            (r for r in range(first_open, num_rows) if used[r] + len(ids) <= row_tokens), None
        )
        if row is None:
            continue
        start, end = used[row], used[row] + len(ids)
        counts[row] += 1
        tokens[row, start:end], segments[row, start:end], learned[row, start:end] = (
            ids,
            counts[row],
            marks,
        )
        used[row] = end
        while first_open < num_rows - 1 and used[first_open] + shortest > row_tokens:
            first_open += 1
    return Batch(tokens, segments, learned)


def make_batch(rng: random.Random, tokenizer: Tokenizer, training: Training) -> Batch:
    """A batch of short conversations, or with probability `long_share` of long ones.

    As many tokens either way.
    """
    capacity = training.rows * training.row_tokens
    if rng.random() < training.long_share and capacity >= _LONG_ROW_TOKENS:
        num_rows, row_tokens, is_long = capacity // _LONG_ROW_TOKENS, _LONG_ROW_TOKENS, True
    else:
        num_rows, row_tokens, is_long = training.rows, training.row_tokens, False
    documents: list[Document] = []
    left = int(capacity * (0.9 if is_long else _FILL))
    while left > 0:
        pieces = _draw(rng, training, is_long=is_long)
        document = _encode(tokenizer, pieces)
        if len(document[0]) <= row_tokens:
            documents.append(document)
            left -= len(document[0])
    return pack(documents, num_rows, row_tokens)


class BatchSource:
    """Processes that make batches without end, ahead of the trainer; use as a context manager."""

    def __init__(self, tokenizer_path: Path, training: Training, num_processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._queue: multiprocessing.Queue[Batch] = context.Queue(maxsize=4 * num_processes)
        self._processes: list[BaseProcess] = [
            context.Process(
                target=_produce, args=(self._queue, tokenizer_path, training, number), daemon=True
            )
            for number in range(num_processes)
        ]

    def __enter__(self) -> "BatchSource":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def next(self, timeout_seconds: float = 60.0) -> Batch:
        """The next batch. Raises RuntimeError if the producers have died or are far too slow."""
        try:
            return self._queue.get(timeout=timeout_seconds)
        except queue.Empty as error:
            raise RuntimeError(f"no batch came in {timeout_seconds} s") from error


def _produce(
    batches: "multiprocessing.Queue[Batch]", path: Path, training: Training, number: int
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(path))
    rng = random.Random(training.seed * 1000 + number)
    while True:
        batches.put(make_batch(rng, tokenizer, training))


def _draw(rng: random.Random, training: Training, *, is_long: bool) -> list[tuple[str, bool]]:
    if not is_long:
        conversation = sample_conversation(rng, chatter_share=training.chatter_share)
        return conversation.pieces(keep_thinking=False)
    num_tokens = int(256 * (4000 / 256) ** rng.random())
    if rng.random() < 0.15:
        return sample_dense_conversation(rng, num_tokens).pieces(keep_thinking=True)
    return sample_long_conversation(rng, num_tokens).pieces(keep_thinking=False)


def _encode(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> Document:
    ids: list[int] = []
    learned: list[bool] = []
    for text, is_learned in pieces:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        learned += [is_learned] * len(piece)
    return ids, learned
