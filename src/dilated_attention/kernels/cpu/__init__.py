"""Compute attention on CPUs: kernels in C++. A tile is a block of rows that a kernel holds while it streams other rows.

call.h        the arguments of a call: tensors, and a table of tiles
forward.h, backward.h
              the kernels: loops over the rows that a tile sees
few.h         the kernels for tiles of few rows
by_block.h    the forward for tiles of few rows that list whole blocks
tiles.h       reads the table, and streams the rows that a tile sees
online.h      attend, attend_dq and attend_dkdv: one step with some rows of a tile and a chunk of streamed rows
rows.h        copies rows from the tensors to the order that products read, and back
product.h     matrix products of small blocks; product_bf16.h and product_bf16_neon.h for bfloat16, product_amx.h for
              bfloat16 in tile registers
amx.h         the instructions for tile registers, which tests/emulated_amx.cpp emulates
vectors.h     vectors of numbers; vectors_avx512.h, vectors_avx2.h and vectors_neon.h are for one instruction set each
threads.h     runs jobs on PyTorch's thread pool
choices.cpp, transpose.cpp, lists.py
              make lists of key blocks from an indexer's choice; turn them into lists of query blocks
estimate.h, estimates.h, estimates.py
              compute the rows that represent blocks of tokens when blocks are chosen, and their softmax;
              estimates_avx2.cpp, estimates_avx512.cpp and estimates_neon.cpp compile this
avx2.cpp, avx512.cpp, avx512_bf16.cpp, amx.cpp, neon.cpp, neon_bf16.cpp
              compile the kernels for one instruction set each; in_float32.h and in_bfloat16.h are what they share
dispatch.cpp  chooses an instruction set at run time, and has the C interface
build.py, __main__.py
              compile all of it
"""
