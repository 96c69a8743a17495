"""Tokens to the ranks of their experts and results back: all dispatchers and the choice.

From outside: `dispatcher` (the protocol) and `dispatchers` (which makes one).
"""
