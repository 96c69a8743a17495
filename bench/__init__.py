"""Benchmarks and their recorded results: a distribution of its own, which epserve does without."""
