"""From an interaction log to batches: sources -> prepare -> store -> split -> loader."""
