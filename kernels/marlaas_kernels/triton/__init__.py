"""The multi-LoRA kernels in Triton, for CUDA and, through triton-ascend, for Ascend NPUs. `op` is the entry.

`config` needs no Triton; importing any other module here imports it.
"""
