"""Triton kernels for models on CUDA. Imported only where a CUDA tensor is at hand: Triton is not there without a GPU."""
