"""The demo model run by transformers in one process.

The answers that everything else is measured against.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo_model.training.checkpoint import load_network
from demo_model.training.corpus import Conversation
from demo_model.training.network import EOS_ID, PAD_ID
from demo_model.training.settings import CHECKPOINT_PATH

# Tokens that are run together. On CPU attention scores are held in memory for every pair of tokens
# of a row.
_CUDA_BATCH_TOKENS, _CPU_BATCH_TOKENS = 100_000, 8_192


class Reference:
    """A checkpoint folder in transformers' model, FP8 dequantised; greedy, in batches."""

    def __init__(
        self,
        folder: Path = CHECKPOINT_PATH,
        dtype: str = "float32",
        device: str = "cpu",
        master: Path | None = None,
    ) -> None:
        self.device = device
        self._batch_tokens = _CPU_BATCH_TOKENS if device == "cpu" else _CUDA_BATCH_TOKENS
        self.network = load_network(
            folder, dtype=getattr(torch, dtype), device=device, master=master
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def answer(self, conversations: Sequence[Conversation], max_tokens: int = 200) -> list[str]:
        """The reply to each conversation, decoded, control tokens hidden."""
        prompts = [self._encode(conversation) for conversation in conversations]
        return [self.tokenizer.decode(ids) for ids in self.generate(prompts, max_tokens)]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuations, each up to and with its end token; in the order of the prompts."""
        replies: dict[int, list[int]] = {}
        for chosen in _batches([len(prompt) for prompt in prompts], self._batch_tokens):
            width = max(len(prompts[number]) for number in chosen)
            padded = [[PAD_ID] * (width - len(prompts[n])) + prompts[n] for n in chosen]
            mask = [[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in chosen]
            output = self.network.main.generate(
                torch.tensor(padded, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=EOS_ID,
                pad_token_id=PAD_ID,
            )
            for number, ids in zip(chosen, output[:, width:].tolist(), strict=True):
                replies[number] = ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids
        return [replies[number] for number in range(len(prompts))]

    @torch.inference_mode()
    def mtp_acceptance(self, conversations: Sequence[Conversation], max_tokens: int = 200) -> float:
        """Share of tokens after the first, of greedy replies, that the MTP layer foresees one step
        early.
        """
        prompts = [self._encode(conversation) for conversation in conversations]
        replies = self.generate(prompts, max_tokens)
        num_accepted = num_drafted = 0
        for chosen in _batches(
            [len(prompt) + max_tokens for prompt in prompts], self._batch_tokens
        ):
            rows = [prompts[number] + replies[number] for number in chosen]
            width = max(map(len, rows))
            tokens = torch.tensor(
                [row + [PAD_ID] * (width - len(row)) for row in rows], device=self.device
            )
            _, ahead = self.network.states(tokens, None)
            drafts = self.network.main.lm_head(ahead).argmax(-1).tolist()
            for number, row, draft in zip(chosen, rows, drafts, strict=True):
                first = len(prompts[number]) + 1
                num_accepted += sum(draft[at - 2] == row[at] for at in range(first, len(row)))
                num_drafted += len(row) - first
        return num_accepted / num_drafted

    def _encode(self, conversation: Conversation) -> list[int]:
        return list(self.tokenizer.encode(conversation.prompt(), add_special_tokens=False).ids)


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in groups of similar length, none of more than `batch_tokens` once padded unless it
    is a single one.
    """
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[number] > batch_tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group
