"""Tokens drawn from logits, without sorting the vocabulary.

Of each row, in descending order of logits (of equal ones the smaller token id first):

    weight[i]  = exp((logits[i] - max) / temperature)
    the first top_k tokens stay                                  0: all
    of them those whose predecessors weigh less than top_p times their total; 0: all
    of them those with weight >= min_p; the first stays in any case
    token      = the first whose predecessors and itself weigh more than uniform x what stayed

    logits       [B, V]  float32, -inf: cannot be drawn
    temperature  [B]     float32; 0: the largest logit
    top_k        [B]     int32;  top_p, min_p [B] float32
    uniform      [B]     float64 in [0, 1)
    returns      [B]     int64

A row's token depends on that row alone. The reference computes in float64. Triton gives the same
token unless `uniform`, or `top_p`, is within BOUND of where another would begin. Nothing waits for
the host.
"""

import torch

from kernels.build.paths import path_of

BOUND = 1e-6


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        raise ValueError(f"logits must be [B, V] float32, are {tuple(logits.shape)} {logits.dtype}")
    knobs = (temperature, top_k, top_p, min_p, uniform)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    if [each.dtype for each in knobs] != list(dtypes):
        raise ValueError(f"knobs must be {dtypes}, are {[each.dtype for each in knobs]}")
    if any(each.shape != logits.shape[:1] for each in knobs):
        raise ValueError(f"knobs must be [{len(logits)}], are {[tuple(k.shape) for k in knobs]}")
    if any(each.device != logits.device for each in knobs):
        raise ValueError(f"knobs must be on {logits.device}")
    if path_of("sample", logits.device) == "triton":
        from kernels.sampling.sample_triton import launch

        return launch(logits, temperature, top_k, top_p, min_p, uniform)
    return sample_reference(logits, temperature, top_k, top_p, min_p, uniform)


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    num_tokens = logits.shape[1]
    is_random = temperature > 0
    divisor = torch.where(is_random, temperature, 1.0).double().unsqueeze(1)
    ordered, token_of = logits.sort(dim=1, descending=True, stable=True)
    # Shifted first: dividing large logits by a tiny temperature must not overflow.
    weight = ((ordered.double() - ordered[:, :1].double()) / divisor).exp()
    place = torch.arange(num_tokens, device=logits.device)
    kept = torch.where(top_k > 0, top_k, num_tokens).unsqueeze(1)
    weight = weight.masked_fill(place >= kept, 0.0)
    share = torch.where(top_p > 0, top_p, 1.0).double().unsqueeze(1)
    before = weight.cumsum(dim=1) - weight
    keep = (before < share * weight.sum(dim=1, keepdim=True)) & (
        weight >= min_p.double().unsqueeze(1)
    )
    keep[:, 0] = True
    weight = weight * keep
    reached = weight.cumsum(dim=1)
    target = uniform.unsqueeze(1) * reached[:, -1:]
    last = (weight > 0).sum(dim=1, keepdim=True) - 1
    drawn = (reached <= target).sum(dim=1, keepdim=True).minimum(last)
    drawn = torch.where(is_random.unsqueeze(1), drawn, 0)
    return token_of.gather(1, drawn).squeeze(1)
