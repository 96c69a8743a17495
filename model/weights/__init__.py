"""Checkpoints: names and shapes of tensors, reading them, what they become on a device.

Imports no other room. From outside: any of it.
"""
