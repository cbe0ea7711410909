"""Backends, the phases that kernels are made of, and what touches Mosaic."""
