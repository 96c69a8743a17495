"""EPLB: a balanced placement from recorded load, moving as few experts as possible.

Pure functions; no torch, no clock.
"""
