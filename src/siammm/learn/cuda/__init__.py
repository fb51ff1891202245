"""The update on a GPU: compiled, with fused networks, captured as a CUDA graph; all Triton kernels of training."""
