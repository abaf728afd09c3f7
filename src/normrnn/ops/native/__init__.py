"""The compiled kernels: their C source, how they are built and loaded, and calls into them."""
