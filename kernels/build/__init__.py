"""What all kernels share: paths by device, compilation, tuned tables, CUDA headers.

Imports no other room.
"""
