"""Settings that every test shares."""

import os

# One thread a process: the machine that tests is small and the numbers must not depend on it.
# Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
