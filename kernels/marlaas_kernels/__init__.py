"""Kernels of MARLaaS: multi-LoRA shrink and expand, and the CoLD contrast.

`reference` is the definition, slow and obvious; `segments` is the same in few large torch operations. `triton`
runs on CUDA and Ascend NPUs, `cpu` on processors; `registry` says which device has the former.
"""
