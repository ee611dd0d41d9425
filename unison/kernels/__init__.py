"""Kernels, each beside its plain-torch reference and behind one dispatcher."""
