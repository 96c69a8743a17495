"""Anthropic's Messages API: its bodies as chat requests, and replies in its form."""
