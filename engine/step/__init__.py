"""One step of a rank: batches, the forward pass, CUDA graphs, planning ahead."""
