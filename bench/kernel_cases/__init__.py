"""What benches and tuners of kernels share: cases at the sizes of DeepSeek-V3, floors, timing on a
GPU, and compiling ahead. Programs of `bench` and tests may import all of it."""
