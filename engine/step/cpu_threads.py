"""How many threads a forward pass gets on the CPU.

Small passes are slower with many threads than with one: each operation then waits for threads
to wake up, on cores that other ranks may be using. So threads are given out by work.
"""

import torch

from model.config import ModelConfig

# One thread's share: some ten milliseconds of work.
FLOPS_A_THREAD = 1e9


class CpuThreads:
    """Sets torch's thread count before each pass, `most` at most."""

    def __init__(self, config: ModelConfig, most: int) -> None:
        self._flops_a_token = 2.0 * active_weights(config)
        self._most = most
        self._current = most
        torch.set_num_threads(most)

    def prepare(self, num_tokens: int) -> int:
        """For a pass of `num_tokens` tokens; the number of threads it gets."""
        wanted = int(num_tokens * self._flops_a_token / FLOPS_A_THREAD)
        count = min(max(wanted, 1), self._most)
        if count != self._current:
            self._current = count
            torch.set_num_threads(count)
        return count


def active_weights(config: ModelConfig) -> int:
    """Weights that one token is multiplied with, embeddings and head left out."""
    heads = config.num_heads
    query_dim = heads * config.qk_head_dim
    if config.q_lora_rank is None:
        query = config.hidden_size * query_dim
    else:
        query = config.q_lora_rank * (config.hidden_size + query_dim)
    expand = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    output = heads * config.v_head_dim * config.hidden_size
    attention = query + config.hidden_size * config.kv_dim + expand + output
    dense = 3 * config.hidden_size * config.intermediate_size
    num_experts = config.experts_per_token + config.num_shared_experts
    experts = 3 * config.hidden_size * config.moe_intermediate_size * num_experts
    num_moe_layers = config.num_layers - config.num_dense_layers
    return (
        config.num_layers * attention + config.num_dense_layers * dense + num_moe_layers * experts
    )
