"""The CUDA kernel system: plain CUDA C++, a ladder from the naive kernel up, compiled when first needed."""
