"""Traced runs: the same tokens through reference and port, module by module."""
