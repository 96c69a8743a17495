"""What a step cannot be faster than: bytes that must be read, at the rate that memory is read."""

from collections.abc import Mapping

from bench.emulated_rank import EmulatedRank
from model.weight_bytes import ATTENTION, DENSE, EXPERTS, SCALES, VOCABULARY, held_weights

EXPERT_PRODUCTS = "expert products"
DENSE_PRODUCTS = "dense products"
ATTENTION_KERNELS = "attention"


def decode_floor(
    rank: EmulatedRank, batch: int, context: int, bytes_per_second: float
) -> Mapping[str, float]:
    """Microseconds of a decode step, by what is read: the weights of the experts that get rows,
    all other weights, and the latents of every request. Activations stay in the cache."""
    config = rank.model.config
    held = {term.name: term.num_bytes for term in held_weights(rank.model)}
    active = min(1.0, batch * config.experts_per_token / rank.num_slots)
    others = held[ATTENTION] + held[DENSE] + held[SCALES] + held[VOCABULARY] / 2
    latents = batch * (context + 1) * config.kv_dim * rank.kv_cache.element_size()
    read = {
        EXPERT_PRODUCTS: active * held[EXPERTS],
        DENSE_PRODUCTS: others,
        ATTENTION_KERNELS: latents * config.num_layers,
    }
    return {name: 1e6 * num_bytes / bytes_per_second for name, num_bytes in read.items()}
