"""Text and tokens: the tokenizer, stop strings, think marks and grammars' texts.

Pure functions of their arguments; imports no other room.
"""
