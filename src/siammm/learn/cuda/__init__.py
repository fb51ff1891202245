"""The accelerated twin of the update: CUDA graphs, fused networks, and every Triton kernel of training."""
