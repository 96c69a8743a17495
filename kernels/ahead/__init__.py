"""Compiling at start what the first requests would otherwise wait for."""
