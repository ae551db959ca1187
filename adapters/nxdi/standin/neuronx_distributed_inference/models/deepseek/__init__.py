"""Blocks of DeepSeek."""

from neuronx_distributed._standin.missing import attribute_hook

__getattr__ = attribute_hook(__name__)
