"""Load on an OpenAI-compatible server, its figures, and records of them: what `ctl bench` and the
benchmarks of the repository share. Torch-free."""
