"""Experts: gate, permutation, grouped products in FP8 and W4A8, fused MoE."""
