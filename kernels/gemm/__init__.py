"""Dense and grouped matrix products in BF16 and FP8."""
