"""The network under training.

Transformers' DeepSeek-V3 and one multi-token-prediction layer beside it.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3MoE,
    DeepseekV3RMSNorm,
)

from demo_model.training.settings import ModelSizes

# Control tokens come first in the vocabulary: begin, end, pad.
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
_DENSE_EXPERTS = "demo_dense"


def config_values(sizes: ModelSizes) -> dict[str, object]:
    """config.json of the model, by the names of the public checkpoints, without the quantisation
    entry.
    """
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "first_k_dense_replace",
        "intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
        "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor",
        "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings",
        "rope_theta", "initializer_range",
    )  # fmt: skip
    factor = sizes.max_position_embeddings / sizes.original_max_position_embeddings
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **{name: getattr(sizes, name) for name in names},
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": sizes.original_max_position_embeddings,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "use_cache": True,
    }


class MtpLayer(nn.Module):
    """Predicts the token after next from the main model's last state and the embedding of the next
    token.

    `shared_head.head` and `embed_tokens` of the public format are the main model's own and not kept
    here.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.enorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, layer_idx=config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        next_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[rows, T, hidden] twice to the states [rows, T, hidden] for the head.

        Entry i foresees token i + 2.
        """
        states = self.eh_proj(torch.cat([self.enorm(next_embeddings), self.hnorm(hidden)], dim=-1))
        states = self.block(
            states, attention_mask=attention_mask, position_embeddings=position_embeddings
        )
        return self.norm(states)


class Network(nn.Module):
    """Main model and MTP layer, and the losses of both."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        self.main = DeepseekV3ForCausalLM(config)
        self.mtp = MtpLayer(config)
        self.mtp.apply(self.main._init_weights)

    def moe_layers(self) -> list[DeepseekV3MoE]:
        """The expert layers, MTP's last."""
        layers = [*self.main.model.layers, self.mtp.block]
        return [layer.mlp for layer in layers if isinstance(layer.mlp, DeepseekV3MoE)]

    def states(
        self, tokens: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States before the head [rows, T, hidden] of the main model, and of the MTP layer (its
        last entry is idle).
        """
        model = self.main.model
        hidden = model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotary = model.rotary_emb(hidden, position_ids=positions)
        following = F.pad(tokens[:, 1:], (0, 1))
        return hidden, self.mtp(model.embed_tokens(following), hidden, mask, rotary)

    def losses(
        self, tokens: torch.Tensor, segments: torch.Tensor, learned: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy in nats of the next token, and of the one after next, over learned
        tokens.

        tokens and segments [rows, T] int64, learned [rows, T] bool, as in `batches.Batch`.
        """
        hidden, ahead = self.states(tokens, packed_mask(segments, torch.bfloat16))
        return (
            self._loss(hidden, tokens, segments, learned, shift=1),
            self._loss(ahead, tokens, segments, learned, shift=2),
        )

    def _loss(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        segments: torch.Tensor,
        learned: torch.Tensor,
        *,
        shift: int,
    ) -> torch.Tensor:
        counted = learned[:, shift:] & (segments[:, shift:] == segments[:, :-shift])
        targets = tokens[:, shift:].masked_fill(~counted, -100)
        logits = self.main.lm_head(states[:, :-shift]).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def packed_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive attention mask [rows, 1, T, T]: causal, and within a segment of [rows, T] only."""
    num_tokens = segments.shape[1]
    allowed = segments[:, None, :, None] == segments[:, None, None, :]
    allowed &= torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segments.device).tril()
    return torch.zeros(allowed.shape, dtype=dtype, device=segments.device).masked_fill_(
        ~allowed, float("-inf")
    )


def dense_experts(
    experts: nn.Module, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
) -> torch.Tensor:
    """Every expert on every token, then weighted: more arithmetic, but two plain products and
    nothing to sort.

    hidden [T, hidden], expert_ids and expert_weights [T, top k] to [T, hidden]. Counts loads in
    `experts.load`.
    """
    num_experts, width = experts.num_experts, experts.intermediate_dim
    spread = torch.zeros(
        hidden.shape[0], num_experts, dtype=expert_weights.dtype, device=hidden.device
    )
    spread = spread.scatter(1, expert_ids, expert_weights)
    if hasattr(experts, "load"):
        experts.load += (spread.detach() > 0).sum(0)
    gate_up = F.linear(hidden, experts.gate_up_proj.flatten(0, 1)).unflatten(
        1, (num_experts, 2 * width)
    )
    gate, up = gate_up.split(width, dim=2)
    inner = F.silu(gate) * up * spread.to(gate.dtype).unsqueeze(2)
    down = experts.down_proj.transpose(1, 2).flatten(0, 1)
    return inner.flatten(1) @ down.to(inner.dtype)


def use_dense_experts(network: Network) -> None:
    """Switch the expert layers to `dense_experts`, with load counters [experts] int64 for the
    balancing bias.
    """
    ALL_EXPERTS_FUNCTIONS.register(_DENSE_EXPERTS, dense_experts)
    network.config._experts_implementation = _DENSE_EXPERTS
    for layer in network.moe_layers():
        layer.experts.config._experts_implementation = _DENSE_EXPERTS
        layer.experts.load = torch.zeros(
            layer.experts.num_experts, dtype=torch.int64, device=layer.experts.down_proj.device
        )
