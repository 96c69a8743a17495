"""Experts of a running worker: their load, rebalancing, the operators' orders."""
