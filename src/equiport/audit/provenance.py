"""Whether the installed source package is the original: its files against the hashes of its own RECORD.

The hashes are read by a fresh, time-limited process without site customisation, so that what the audited code may have
changed in this one does not matter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from equiport.audit.model import Rule, Severity
from equiport.audit.paraphrase import package_root

_SHARED = ("modeling_utils.py", "activations.py", "modeling_rope_utils.py", "cache_utils.py", "masking_utils.py",
           "integrations/sdpa_attention.py")  # fmt: skip
_UNKNOWN = "is not in the package's record"

_CHECK = r"""
import base64, hashlib, importlib.metadata, json, sys
wanted = json.loads(sys.argv[1])
sys.path[:] = json.loads(sys.argv[2])
try:
    files = {str(file): file for file in importlib.metadata.distribution("transformers").files or ()}
except importlib.metadata.PackageNotFoundError:
    files = {}
said = {}
for name in wanted:
    file = files.get(name)
    if file is None or file.hash is None:
        said[name] = "is not in the package's record"
        continue
    try:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
    except OSError as fault:
        said[name] = f"cannot be read: {fault.strerror}"
        continue
    same = base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value
    said[name] = "" if same else "differs from what was installed"
print(json.dumps(said))
"""


RULE = Rule(
    id="reference-modified",
    severity=Severity.ERROR,
    title="the installed source is not the original",
    why="A reference that was edited agrees with whatever it was edited for.",
    remedy="Install transformers anew; patches belong to the port, never to the source.",
    check=lambda module: (),
    bad=(),
    good=(),
)


@dataclass(frozen=True)
class Provenance:
    """One file of transformers by its path in the package: whether it can be checked, and what is wrong with it."""

    file: str
    known: bool
    fault: str


def check_provenance(families: Iterable[str], timeout: float = 30.0) -> tuple[Provenance, ...]:
    """Check the modeling and configuration files of model families, and the files that every family rests on.

    A process that fails or takes longer than `timeout` seconds is a fault of every file. The answer is kept as long as
    the files' sizes and times stay as they are.
    """
    root = package_root()
    if root is None:
        return ()
    names = [f"models/{name}/{kind}_{name}.py" for name in families for kind in ("modeling", "configuration")]
    present = [name for name in (*names, *_SHARED) if (root / name).is_file()]
    state = tuple((name, (root / name).stat().st_mtime_ns, (root / name).stat().st_size) for name in present)
    return _checked(state, timeout)


@lru_cache(maxsize=64)
def _checked(state: tuple[tuple[str, int, int], ...], timeout: float) -> tuple[Provenance, ...]:
    files = [f"transformers/{name}" for name, _, _ in state]
    places = json.dumps([path for path in sys.path if path])
    command = [sys.executable, "-I", "-c", _CHECK, json.dumps(files), places]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
        said = {str(name): str(fault) for name, fault in json.loads(ended.stdout).items()}
    except (subprocess.SubprocessError, ValueError, AttributeError) as fault:
        return tuple(Provenance(file, True, f"cannot be checked: {type(fault).__name__}") for file in files)
    return tuple(Provenance(file, said.get(file) != _UNKNOWN, said.get(file, "was not checked")) for file in files)
