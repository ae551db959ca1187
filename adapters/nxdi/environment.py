"""Which tier NxD Inference gets here: installed packages, source folders, or the stand-in; imports none of them."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from equiport import __version__ as equiport_version
from equiport.errors import EquiportError
from equiport.stacks.contract import Tier

from .fabricated.finder import CLOSED_PACKAGES, installed_finder

STAND_IN = Path(__file__).resolve().parent / "standin"
NXDI, NXD = "neuronx_distributed_inference", "neuronx_distributed"
SOURCE_VARIABLES = {NXDI: "EQUIPORT_NXDI_SRC", NXD: "EQUIPORT_NXD_SRC"}
WANTED_TRANSFORMERS = "4.57."
DEVICE_NODE = Path("/dev/neuron0")


@dataclass(frozen=True)
class Environment:
    """What `create_model` and the stages in CPU mode run on. `paths` go to the front of sys.path, in this order."""

    tier: Tier
    paths: tuple[Path, ...]
    version: str
    why: str
    device_present: bool = False


def resolve_environment() -> Environment:
    """Look at the source variables, then at the installed packages, then fall back to the stand-in.

    Raises:
        EquiportError: a source folder was given that holds no such package, or that cannot run with this transformers.
    """
    sources = {
        name: _source_folder(name, os.environ[name_of])
        for name, name_of in SOURCE_VARIABLES.items()
        if os.environ.get(name_of)
    }
    installed = {name for name in SOURCE_VARIABLES if _installed(name)}
    transformers = _version_of("transformers")
    fits = transformers.startswith(WANTED_TRANSFORMERS)
    if sources:
        lacking = [name for name in SOURCE_VARIABLES if name not in sources and name not in installed]
        if lacking:
            raise EquiportError(
                f"{lacking[0]} is neither installed nor given as sources",
                field=SOURCE_VARIABLES[lacking[0]],
                remedy=f"Set {SOURCE_VARIABLES[lacking[0]]} to its repository or src folder.",
            )
        if not fits:
            raise EquiportError(
                f"the real NxD Inference needs transformers {WANTED_TRANSFORMERS}*, here is {transformers}",
                field=SOURCE_VARIABLES[next(iter(sources))],
                remedy=f'`pip install "transformers=={WANTED_TRANSFORMERS}*"`, or unset the variable for the stand-in.',
            )
        version = ", ".join(f"{name} {_source_version(folder, name)}" for name, folder in sources.items())
        why = f"sources given: {', '.join(map(str, sources.values()))}{_fabricated()}"
        return Environment(Tier.REAL_CPU, tuple(sources.values()), version, why)
    if installed == set(SOURCE_VARIABLES) and fits:
        version = ", ".join(f"{name} {_version_of(name.replace('_', '-'))}" for name in SOURCE_VARIABLES)
        device = DEVICE_NODE.exists() and _installed("torch_neuronx")
        why = "installed packages" + (", with a Neuron device for compiled models" if device else ", no Neuron device")
        return Environment(Tier.REAL_CPU, (), version, why, device_present=device)
    if installed == set(SOURCE_VARIABLES):
        why = f"the installed NxD Inference needs transformers {WANTED_TRANSFORMERS}*, here is {transformers}"
    else:
        why = f"{NXDI} is not installed, and neither EQUIPORT_NXDI_SRC nor EQUIPORT_NXD_SRC is set"
    return Environment(Tier.STAND_IN, (STAND_IN,), equiport_version, why)


def installed_roots() -> tuple[Path, ...]:
    """Folders that hold the installed packages."""
    specs = [importlib.util.find_spec(name) for name in SOURCE_VARIABLES]
    return tuple(dict.fromkeys(Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin))


def _source_folder(name: str, given: str) -> Path:
    root = Path(given).expanduser()
    for folder in (root, root / "src"):
        if (folder / name / "__init__.py").is_file():
            return folder.resolve()
    raise EquiportError(
        f"holds no {name}",
        where=root,
        field=SOURCE_VARIABLES[name],
        remedy="Give the repository's root or its src folder.",
    )


def _installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    return STAND_IN not in Path(spec.origin).resolve().parents and not spec.origin.startswith("fabricated")


def _version_of(distribution: str) -> str:
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _source_version(folder: Path, name: str) -> str:
    """Git commit of the checkout that holds the folder; else the package's own _version.py, and what its files hold."""
    if (folder / ".git").exists() or (folder.parent / ".git").exists():
        asked = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            status = ["git", "-C", str(folder), "status", "--porcelain", "--", "."]
            changed = subprocess.run(status, capture_output=True, text=True, check=False).stdout.strip()
            return asked.stdout.strip() + (f"+{_digest(folder / name)}" if changed else "")
    file = folder / name / "_version.py"
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", file.read_text(encoding="utf-8")) if file.is_file() else None
    return f"{found.group(1) if found else 'unknown'}+{_digest(folder / name)}"


@functools.cache
def _digest(package: Path) -> str:
    """Of all Python files: sources that are edited are other sources."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:8]


def _fabricated() -> str:
    """Which closed packages are not here, in words."""
    finder = installed_finder()
    made = finder.packages if finder is not None else ()
    absent = [name for name in CLOSED_PACKAGES if name in made or importlib.util.find_spec(name) is None]
    return f"; fabricated, as they are not installed: {', '.join(absent)}" if absent else ""
