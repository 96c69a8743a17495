"""From nothing to a rank that serves: memory plan, weights, kernels, warm-up."""
