"""Unit tests of translated blocks: `from block_testing_utils import test_block_correctness`."""

from equiport.port.translate_block_test import BlockResult, test_block_correctness

__all__ = ["BlockResult", "test_block_correctness"]
