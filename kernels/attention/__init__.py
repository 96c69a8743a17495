"""Multi-head latent attention: decode, prefill, absorbed projections, RoPE, paged latents."""
