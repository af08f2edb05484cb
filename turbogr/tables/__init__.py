"""Named embedding tables: their rows, what a batch needs of them, and the optimisers of their rows.

No torch.distributed here: `turbogr.parallel.sharded_table` offers the same `Table` over many ranks.
"""
