"""Small tensors only: one thread is faster than many, and keeps float sums in one order."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
