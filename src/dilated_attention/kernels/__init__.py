"""Triton kernels: `online` computes one step on tiles, `strided` loops over spans,
`block_lists` over lists of blocks."""
