"""Kernels for processors, compiled by Numba. Importing the package does not import Numba; its modules do."""
