"""What CuTe's compiler reads: the kernels, and what they share."""
