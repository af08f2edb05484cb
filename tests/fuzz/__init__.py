"""Random and hostile inputs: operators under sanitizers, and mutated stores, runs and recipes."""
