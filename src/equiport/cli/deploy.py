"""`equiport deploy`: skills, agents and references for an agent CLI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Quiet

HELP = """Install skills, agents and references for an agent CLI, or take them away again.

Examples:
  equiport deploy claude --dry-run
  equiport deploy claude --dest ~/.claude
  equiport deploy kiro
  equiport deploy claude --uninstall

The list that is printed is what is done. DEST/equiport/manifest.json names every installed file with its hash; a second
run updates what is as it was. A file of yours in the way, or one that you changed: exit 2, nothing written; --force
installs and keeps yours beside as NAME.before-equiport, which --uninstall puts back. --uninstall removes what was
installed and is unchanged, and leaves what you changed (with --force: kept as NAME.edited).

claude: skills/NAME/SKILL.md and agents/NAME.md below DEST. kiro: skills/NAME/SKILL.md and agents/NAME.json with its
prompt in agents/prompts, as Kiro documents it. The claude layout is tested with that CLI, the kiro one by its files.

The repository is also a plugin as it stands (.claude-plugin); nothing needs to be installed then.
"""


def deploy(
    kind: Annotated[str, typer.Argument(help="claude or kiro.")],
    dest: Annotated[Path | None, typer.Option(help="Folder of the agent CLI. [default: .claude or .kiro here]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and do nothing.")] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take away what was installed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace your files too; a copy of each is kept.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """List every file, then install or uninstall."""

    def action() -> int:
        import shutil

        from equiport.content import content_dir
        from equiport.deploy.install import Act, apply_install, apply_uninstall, plan_install, plan_uninstall
        from equiport.deploy.layout import default_destination
        from equiport.errors import ExitCode

        root = content_dir("skills").parent
        destination = (dest or default_destination(kind)).expanduser()
        plan = (
            plan_uninstall(kind, destination, force=force)
            if uninstall
            else plan_install(kind, root, destination, force=force)
        )
        if not dry_run:
            (apply_uninstall if uninstall else apply_install)(plan)
        for item in plan.actions:
            if not quiet or item.act in (Act.LEAVE, Act.REPLACE, Act.RESTORE):
                print(item)
        done = "would be changed" if dry_run else "changed"
        print(f"{destination}: {len(plan.changes)} of {len(plan.actions)} files {done}")
        if not uninstall:
            found = shutil.which("equiport")
            print(f"commands: {found or 'equiport is not on PATH: activate its environment first'}; {root / 'scripts'}")
        return int(ExitCode.PASS)

    run_command(action, debug=debug)
