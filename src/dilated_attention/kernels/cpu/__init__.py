"""The CPU kernels, in C++.

call.h        what they are given: tensors, a table of tiles
forward.h, backward.h, few.h
              the kernels: loops over the rows that a tile sees; few.h of tiles of few rows
tiles.h       lines of the table, the stream of those rows
online.h      attend, attend_dq, attend_dkdv: one group of rows that a tile holds, one chunk of rows that it streams
rows.h        rows from where they lie to where products read them, and back
product.h     micro-kernels; product_bf16.h and product_bf16_neon.h for bfloat16, product_amx.h for bfloat16 in tile
              registers
amx.h         the instructions on tile registers, which tests/emulated_amx.cpp emulates
vectors.h     a vector of numbers at a time: vectors_avx512.h, vectors_avx2.h, vectors_neon.h
threads.h     PyTorch's pool
transpose.cpp, lists.py
              lists of blocks seen from the keys
estimate.h, estimates.h, estimates.py
              what stands for blocks of tokens when blocks are chosen, and its softmax; estimates_avx2.cpp,
              estimates_avx512.cpp, estimates_avx512_bf16.cpp and estimates_neon.cpp compile it
avx2.cpp, avx512.cpp, avx512_bf16.cpp, amx.cpp, neon.cpp, neon_bf16.cpp
              one instruction set each; in_float32.h and in_bfloat16.h are what they share
dispatch.cpp  the choice among them, and the interface in C
build.py, __main__.py
              compile all of it
"""
