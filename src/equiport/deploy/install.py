"""Install and uninstall: everything is decided before anything is touched, and what is listed is what is done."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from equiport.deploy.layout import Item, items
from equiport.deploy.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from equiport.errors import EquiportError


class Act(str, Enum):
    """What happens to one file."""

    ADD = "add"
    UPDATE = "update"
    SAME = "unchanged"
    REPLACE = "replace"  # the user's, or changed by the user; only by force, with a backup
    REMOVE = "remove"
    LEAVE = "leave"  # changed by the user, or identical and not ours
    RESTORE = "restore"


@dataclass(frozen=True)
class Action:
    """One line of the list. `note`: the backup's name, or why a file is left."""

    act: Act
    path: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.act.value:9} {self.path}" + (f"  ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Plan:
    """What will be done to DEST, in order."""

    kind: str
    root: Path
    destination: Path
    actions: tuple[Action, ...]

    @property
    def changes(self) -> tuple[Action, ...]:
        """Those that touch a file."""
        return tuple(item for item in self.actions if item.act not in (Act.SAME, Act.LEAVE))


def plan_install(kind: str, root: Path, destination: Path, *, force: bool) -> Plan:
    """Decide what an installation does.

    Raises:
        EquiportError: a file of the user's is in the way and `force` is not set, or a link or folder is in its place.
    """
    old = _manifest(kind, destination)
    actions: list[Action] = []
    blocked: list[str] = []
    wanted = items(kind, root, destination)
    for item in wanted:
        action = _action(item, old, destination)
        if action is None:
            raise EquiportError(
                "a link or a folder is where a file goes",
                where=destination / item.target,
                remedy="Move it away, or choose another --dest.",
            )
        actions.append(action)
        if action.act is Act.REPLACE:
            blocked.append(action.path)
    if blocked and not force:
        more = f" and {len(blocked) - 3} more" if len(blocked) > 3 else ""
        raise EquiportError(
            f"not installed by equiport, or changed since: {', '.join(blocked[:3])}{more}; nothing was written",
            where=destination,
            remedy="Move them, choose another --dest, or add --force (each is kept beside, as NAME.before-equiport).",
        )
    gone = sorted(set(old.files) - {item.target for item in wanted}) if old else []
    actions += [_removal(path, old, destination, force=False) for path in gone if old is not None]
    return Plan(kind, root, destination, tuple(actions))


def apply_install(plan: Plan) -> None:
    """Do it. The manifest is written first, so that an interrupted installation can be taken away."""
    destination = plan.destination
    old = read_manifest(destination)
    wanted = {item.target: item for item in items(plan.kind, plan.root, destination)}
    ours = {action.path for action in plan.actions if action.act in (Act.ADD, Act.UPDATE, Act.SAME, Act.REPLACE)}
    kept = {action.path: old.files[action.path] for action in plan.actions if old and action.act is Act.LEAVE
            and action.path in old.files}  # fmt: skip
    files = {**kept, **{path: _sha(wanted[path].data) for path in sorted(ours)}}
    backups = {**(old.backups if old else {})}
    backups |= {action.path: action.note for action in plan.actions if action.act is Act.REPLACE}
    folders = list(dict.fromkeys([*(old.folders if old else []), *_new_folders(destination, [*files, MANIFEST])]))
    manifest = Manifest(kind=plan.kind, root=str(plan.root), files=files, backups=backups, folders=folders)
    write_manifest(destination, manifest.model_copy(update={"before": old.files if old else {}}))
    for action in plan.actions:
        path = destination / action.path
        if action.act is Act.REPLACE:
            path.rename(destination / action.note)
        if action.act in (Act.ADD, Act.UPDATE, Act.REPLACE):
            _write(path, wanted[action.path].data)
        elif action.act is Act.REMOVE:
            path.unlink(missing_ok=True)
    write_manifest(destination, manifest)


def plan_uninstall(kind: str, destination: Path, *, force: bool) -> Plan:
    """Decide what is taken away: what was installed and is as it was; by force also what was changed (kept beside).

    Raises:
        EquiportError: nothing was installed here.
    """
    manifest = _manifest(kind, destination)
    if manifest is None:
        raise EquiportError("nothing was installed here", where=destination, remedy="Check --dest.")
    actions = []
    for path in manifest.files:
        action = _removal(path, manifest, destination, force=force)
        actions.append(action)
        backup = manifest.backups.get(path)
        if backup and action.act is not Act.LEAVE and (destination / backup).is_file():
            actions.append(Action(Act.RESTORE, path, backup))
    return Plan(kind, Path(manifest.root), destination, tuple(actions))


def apply_uninstall(plan: Plan) -> None:
    """Do it. What is left stays in the manifest, for a later --uninstall --force."""
    destination = plan.destination
    manifest = read_manifest(destination)
    assert manifest is not None
    for action in plan.actions:
        path = destination / action.path
        if action.act is Act.REMOVE and action.note:
            path.rename(destination / action.note)
        elif action.act is Act.REMOVE:
            path.unlink(missing_ok=True)
        elif action.act is Act.RESTORE:
            (destination / action.note).rename(path)
    left = {action.path for action in plan.actions if action.act is Act.LEAVE}
    if left:
        files = {path: digest for path, digest in manifest.files.items() if path in left}
        backups = {path: name for path, name in manifest.backups.items() if path in left}
        write_manifest(destination, manifest.model_copy(update={"files": files, "backups": backups}))
    else:
        (destination / MANIFEST).unlink()
    for folder in reversed(manifest.folders):
        with contextlib.suppress(OSError):  # not empty: something else lives there
            (destination / folder).rmdir()


def _manifest(kind: str, destination: Path) -> Manifest | None:
    found = read_manifest(destination)
    if found is not None and found.kind != kind:
        raise EquiportError(
            f"holds an installation for {found.kind}", where=destination, remedy=f"Give --dest, or {found.kind}."
        )
    return found


def _action(item: Item, old: Manifest | None, destination: Path) -> Action | None:
    path = destination / item.target
    parents = [destination / part for part in Path(item.target).parents if part != Path()]
    if any(parent.is_symlink() or (parent.exists() and not parent.is_dir()) for parent in parents):
        return None
    if path.is_symlink() or path.is_dir():
        return None
    if not path.exists():
        return Action(Act.ADD, item.target)
    digest, known = _sha(path.read_bytes()), old is not None and item.target in old.files
    if digest == _sha(item.data):
        return Action(Act.SAME, item.target) if known else Action(Act.LEAVE, item.target, "the same, and not ours")
    if old is not None and old.owns(item.target, digest):
        return Action(Act.UPDATE, item.target)
    return Action(Act.REPLACE, item.target, _free(destination, item.target, "before-equiport"))


def _removal(path: str, manifest: Manifest, destination: Path, *, force: bool) -> Action:
    file = destination / path
    if file.is_symlink() or file.is_dir():
        return Action(Act.LEAVE, path, "no longer a file")
    if not file.exists() or manifest.owns(path, _sha(file.read_bytes())):
        return Action(Act.REMOVE, path)
    if force:
        return Action(Act.REMOVE, path, _free(destination, path, "edited"))
    return Action(Act.LEAVE, path, "changed since it was installed; --force takes it away and keeps a copy")


def _free(destination: Path, path: str, suffix: str) -> str:
    name, number = f"{path}.{suffix}", 1
    while os.path.lexists(destination / name):
        number += 1
        name = f"{path}.{suffix}-{number}"
    return name


def _new_folders(destination: Path, paths: Sequence[str]) -> list[str]:
    """Folders that do not exist yet, DEST itself (".") among them, outermost first."""
    inner = {folder for path in paths for folder in Path(path).parents}
    return [folder.as_posix() for folder in sorted(inner, key=lambda one: (len(one.parts), one))
            if not (destination / folder).exists()]  # fmt: skip


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
