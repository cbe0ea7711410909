"""Phases that the attention kernels share: what they read, what they write, and the softmax between."""
