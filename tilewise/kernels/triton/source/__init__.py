"""What Triton compiles: kernels, and what they share."""
