"""Triton kernels: `online` holds one tile step, `strided` loops over spans, `block_lists` over lists of blocks."""
