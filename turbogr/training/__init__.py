"""Training: the loop, its optimisers, checkpoints and records."""
