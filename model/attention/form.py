"""Which form of attention is cheaper for a row's new tokens after its cached prefix.

Plain form expands every latent that the row sees to keys and values of all heads, 2 C (D + V) FLOP
each, and looks at D + R + V elements for each query and key. Absorbed form folds kv_b into each
query and result, as many FLOP for a new token, and looks at 2 C + R. So a prefix costs the plain
form once, and each of its keys costs the absorbed one more for each new token: with DeepSeek-V3's
sizes, Q new tokens after P cached ones take fewer FLOP in plain form when

    P * C (D + V)  <  Q * (P + Q / 2) * (2 C - D - V)

Time differs from that: the absorbed form's products of few rows wait for memory, and its new tokens
are filled up to a power of two. From 1,024 cached tokens on it is the faster one up to 64 new ones,
however long the prefix is.
"""

from model.batch import AttentionForm

# From so many cached tokens on, plain form wins with so many new ones: what
# `python -m bench.attention_form` measured on an H200.
PLAIN_FROM = ((0, 1), (128, 5), (256, 9), (512, 17), (1024, 65))


def attention_form(prefix_tokens: int, new_tokens: int) -> AttentionForm:
    """For one row. ValueError for less than one new token or a prefix below none."""
    if prefix_tokens < 0 or new_tokens < 1:
        raise ValueError(f"no such row: {new_tokens} new tokens after {prefix_tokens}")
    least = next(new for prefix, new in reversed(PLAIN_FROM) if prefix <= prefix_tokens)
    return AttentionForm.PLAIN if new_tokens >= least else AttentionForm.ABSORBED
