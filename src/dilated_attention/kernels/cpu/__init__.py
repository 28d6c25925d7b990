"""The CPU kernels, in C++: call.h describes what they are given; from there strided.h, online.h, rows.h, product.h."""
