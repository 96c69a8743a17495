"""Which physical slots hold which logical experts, per layer."""
