"""Grammars while generating: which tokens may come next in each request."""
