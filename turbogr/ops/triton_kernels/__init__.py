"""Triton kernels and how they are launched: what `csrc/` is for the CPU.

Importing this package imports no Triton. The modules with kernels are imported when one is first launched, so that a
machine without an accelerator does not pay for it. `launching.py` decides tiles and options; `*_variants.py` list every
variant that is compiled and checked without a device (`turbogr bench kernels`).
"""
