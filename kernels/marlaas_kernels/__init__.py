"""Kernels of MARLaaS: multi-LoRA shrink and expand, and the CoLD contrast.

`reference` is the definition, slow and obvious; `segments` is the same in few large torch operations.
"""
