"""Benchmarks: what equiport says of many ports, as tables."""
