"""What TileLang compiles of linear attention: kernels, and what they share."""
