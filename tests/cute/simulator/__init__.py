"""Kernels run on a CPU, as the compiler wrote them down: PTX, one warp at a time.

Slow and strict. Copies of the copy engine land late and in any order, products are made as soon as they are issued or
when they are waited for, and warps take turns at random. What is read before it is there is NaN; addresses outside of
arrays are refused; that all wait for each other is told. Registers, caches, fences and the time that anything takes are
not modelled.
"""
