"""The only package that imports torch.distributed."""
