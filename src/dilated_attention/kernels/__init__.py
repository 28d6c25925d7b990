"""Triton kernels. `online` holds one tile step, `strided` loops over strided spans, `blocks` over lists of blocks."""
