"""The native engine on CUDA: the same scheduler, sequences and random numbers, decoding in CUDA graphs.

Imported only where the module is on a CUDA device: Triton is not there without one.
"""
