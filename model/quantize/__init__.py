"""`python -m model.quantize`: a checkpoint with int4 experts from one without, file by file.

Nothing in it is imported from outside.
"""
