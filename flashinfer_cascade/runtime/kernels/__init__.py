"""The package's own Triton kernels."""
