"""Ranks at full size with made-up weights, one alone or a group: configurations, how they are
built, fed and broken down. Programs of `bench` and tests may import all of it."""
