"""What counts as a comparator that was replaced, and what torch does by itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from equiport.audit.dynamic.judges import changed, remember
before = remember()
import torch._dynamo
assert torch.manual_seed is not torch.random.manual_seed
print(changed(before))
torch.manual_seed = torch._disable_dynamo(lambda seed: None)
print(changed(before))
torch.allclose = lambda *args, **kwargs: True
print(changed(before))
"""


def test_torchs_own_wrapper_is_no_replacement_and_the_same_wrapper_around_another_function_is() -> None:
    """Importing torch._dynamo, which a layer norm may bring about, wraps torch.manual_seed."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["[]", "['torch.manual_seed']", "['torch.allclose', 'torch.manual_seed']"]
