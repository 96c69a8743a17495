"""The last step of every combine: a token's weighted sum over its chosen experts.

`out[t] = sum over k of weights[t, k] * rows[row_of[k, t]]`, in float32, one choice after the
other. Products and sums are separate element-wise operations in a fixed order, so that the
result for a token has the same bits whatever else is in the batch and on whichever ranks its
experts are.
"""

import torch


def weighted_sum(
    rows: torch.Tensor,  # [N, H]
    row_of: torch.Tensor,  # [K, T] int64
    weights: torch.Tensor,  # [T, K] float32
) -> torch.Tensor:
    """[T, H] in the dtype of `rows`, accumulated in float32."""
    num_choices, num_tokens = row_of.shape
    chosen = rows.index_select(0, row_of.reshape(-1)).view(num_choices, num_tokens, rows.shape[1])
    scaled = chosen.float() * weights.t().unsqueeze(-1)
    total = scaled[0]
    for choice in range(1, num_choices):
        total.add_(scaled[choice])
    return total.to(rows.dtype)
