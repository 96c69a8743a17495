"""Mixture of experts: routing, the routed experts in each of their types, the shared one beside.

From outside: `moe` (layers), and the kinds of experts for who counts their bytes.
"""
