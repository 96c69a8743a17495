"""The checkpoint that ships, in `checkpoint`."""
