"""Triton kernels: `strided` has the kernels, `online` computes one step of their loops, and `block_lists` chooses the
steps when a block layout lists the blocks to visit. `cpu` holds the kernels in C++."""
