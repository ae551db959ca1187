"""`equiport deploy`: what is listed is what is done, the user's files are theirs, and nothing is left behind."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from worlds import equiport_command

from equiport.content import content_dir
from equiport.deploy.install import apply_install, apply_uninstall, plan_install, plan_uninstall
from equiport.deploy.manifest import MANIFEST, read_manifest
from equiport.errors import EquiportError
from equiport.skills.page import read_page

ROOT = content_dir("skills").parent
KINDS = ("claude", "kiro")
SKILLS = sorted(path.name for path in (ROOT / "skills").iterdir())
AGENTS = sorted(path.stem for path in (ROOT / "agents").glob("*.md"))


def deploy(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(equiport_command("deploy", *arguments), capture_output=True, text=True, cwd=cwd)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def install(kind: str, destination: Path, *, force: bool = False) -> None:
    apply_install(plan_install(kind, ROOT, destination, force=force))


def uninstall(kind: str, destination: Path, *, force: bool = False) -> None:
    apply_uninstall(plan_uninstall(kind, destination, force=force))


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    listed = deploy(tmp_path, kind, "--dry-run")
    assert listed.returncode == 0 and not list(tmp_path.iterdir())
    done = deploy(tmp_path, kind)
    assert done.returncode == 0, done.stderr
    added = re.findall(r"^add +(\S+)$", done.stdout, re.MULTILINE)
    assert added == re.findall(r"^add +(\S+)$", listed.stdout, re.MULTILINE)
    assert sorted([*added, MANIFEST]) == sorted(files(tmp_path / f".{kind}"))
    for skill in SKILLS:
        assert f"skills/{skill}/SKILL.md" in added
    for agent in AGENTS:
        assert f"agents/{agent}.{'json' if kind == 'kiro' else 'md'}" in added
    again = deploy(tmp_path, kind)
    assert again.returncode == 0 and "0 of" in again.stdout
    gone = deploy(tmp_path, kind, "--uninstall")
    assert gone.returncode == 0 and sorted(re.findall(r"^remove +(\S+)$", gone.stdout, re.MULTILINE)) == sorted(added)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_whole_where_they_are(kind: str, tmp_path: Path) -> None:
    """Links lead to installed files, the scripts are named by a path that exists, nothing is left to be expanded."""
    destination = tmp_path / "agent-cli"
    install(kind, destination)
    pages = [path for path in destination.rglob("*.md")]
    assert len(pages) > 20
    scripts = set()
    for path in pages:
        text = path.read_text()
        assert "CLAUDE_PLUGIN_ROOT" not in text
        scripts |= set(re.findall(r"(/\S+?/scripts)/", text))
        for link in read_page(path).links:
            if not re.match(r"[a-z]+:|#", link.text):
                target = (path.parent / link.text.partition("#")[0]).resolve()
                assert target.is_file() and target.is_relative_to(destination.resolve()), (path, link)
    assert scripts == {str(ROOT / "scripts")}


def test_agents_of_kiro(tmp_path: Path) -> None:
    install("kiro", tmp_path / ".kiro")
    agent = json.loads((tmp_path / ".kiro/agents/port-auditor.json").read_text())
    assert agent["name"] == "port-auditor" and agent["tools"] == ["read", "glob", "grep"]
    assert agent["resources"][0].endswith(".kiro/skills/**/SKILL.md")
    prompt = tmp_path / ".kiro/agents" / agent["prompt"].removeprefix("file://./")
    assert prompt.is_file() and not prompt.read_text().startswith("---")


def test_a_users_file_is_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / ".claude" / "agents" / "planner.md"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    refused = deploy(tmp_path, "claude")
    assert refused.returncode == 2 and "agents/planner.md" in refused.stderr and "--force" in refused.stderr
    assert files(tmp_path) == {".claude/agents/planner.md": b"mine"}
    forced = deploy(tmp_path, "claude", "--force")
    assert (
        forced.returncode == 0 and "replace   agents/planner.md  (agents/planner.md.before-equiport)" in forced.stdout
    )
    assert (mine.parent / "planner.md.before-equiport").read_text() == "mine" != mine.read_text()
    back = deploy(tmp_path, "claude", "--uninstall")
    assert back.returncode == 0 and "restore" in back.stdout
    assert files(tmp_path) == {".claude/agents/planner.md": b"mine"}


def test_an_edited_file_is_neither_updated_nor_removed(tmp_path: Path) -> None:
    destination = tmp_path / "cli"
    install("claude", destination)
    edited = destination / "skills/audit-port/SKILL.md"
    edited.write_text(edited.read_text() + "\nMy own rule.\n")
    with pytest.raises(EquiportError, match="changed since: skills/audit-port/SKILL.md; nothing was written"):
        plan_install("claude", ROOT, destination, force=False)
    taken = deploy(tmp_path, "claude", "--dest", destination, "--uninstall")
    assert taken.returncode == 0 and "leave     skills/audit-port/SKILL.md  (changed since" in taken.stdout
    assert sorted(files(destination)) == [MANIFEST, "skills/audit-port/SKILL.md"]
    uninstall("claude", destination, force=True)
    assert list(files(destination)) == ["skills/audit-port/SKILL.md.edited"]


def test_a_forced_update_keeps_the_edit(tmp_path: Path) -> None:
    destination = tmp_path / "cli"
    install("claude", destination)
    page = destination / "agents/planner.md"
    own = page.read_text()
    page.write_text("edited")
    install("claude", destination, force=True)
    assert page.read_text() == own and (destination / "agents/planner.md.before-equiport").read_text() == "edited"


def test_an_older_version_is_updated_and_what_it_had_alone_is_removed(tmp_path: Path) -> None:
    destination = tmp_path / "cli"
    install("claude", destination)
    manifest = json.loads((destination / MANIFEST).read_text())
    old, gone = destination / "agents/planner.md", destination / "skills/old-skill/SKILL.md"
    gone.parent.mkdir()
    for path, text in ((old, "older"), (gone, "gone")):
        path.write_text(text)
        import hashlib

        manifest["files"][path.relative_to(destination).as_posix()] = hashlib.sha256(text.encode()).hexdigest()
    manifest["folders"].append("skills/old-skill")
    (destination / MANIFEST).write_text(json.dumps(manifest))
    plan = plan_install("claude", ROOT, destination, force=False)
    assert {str(item) for item in plan.changes} == {
        "update    agents/planner.md",
        "remove    skills/old-skill/SKILL.md",
    }
    apply_install(plan)
    assert old.read_text() != "older" and not gone.exists()
    uninstall("claude", destination)
    assert not destination.exists()


def test_an_interrupted_installation_is_finished_or_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from equiport.deploy import install as module

    written: list[Path] = []
    write = module._write

    def stops(path: Path, data: bytes) -> None:
        if len(written) == 5:
            raise KeyboardInterrupt
        write(path, data)
        written.append(path)

    monkeypatch.setattr(module, "_write", stops)
    destination = tmp_path / "cli"
    with pytest.raises(KeyboardInterrupt):
        install("claude", destination)
    monkeypatch.setattr(module, "_write", write)
    assert len(files(destination)) == 6
    uninstall("claude", destination)
    assert not destination.exists()


def test_files_beside_ours_stay(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents/mine.md").write_text("mine")
    (tmp_path / "settings.json").write_text("{}")
    before = files(tmp_path)
    install("claude", tmp_path)
    (tmp_path / "equiport/references/note.md").write_text("a note of mine")
    uninstall("claude", tmp_path)
    assert files(tmp_path) == {**before, "equiport/references/note.md": b"a note of mine"}


def test_an_identical_file_of_the_user_is_not_ours(tmp_path: Path) -> None:
    install("claude", tmp_path / "one")
    page = "agents/planner.md"
    (tmp_path / "two/agents").mkdir(parents=True)
    (tmp_path / "two" / page).write_bytes((tmp_path / "one" / page).read_bytes())
    install("claude", tmp_path / "two")
    found = read_manifest(tmp_path / "two")
    assert found is not None and page not in found.files
    uninstall("claude", tmp_path / "two")
    assert list(files(tmp_path / "two")) == [page]


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli/skills").symlink_to(outside)
    with pytest.raises(EquiportError, match="a link or a folder is where a file goes"):
        plan_install("claude", ROOT, tmp_path / "cli", force=True)
    assert not list(outside.iterdir())


@pytest.mark.parametrize("path", ["../victim", "/etc/passwd", "a/../../victim"])
def test_a_manifest_cannot_name_other_folders(tmp_path: Path, path: str) -> None:
    destination = tmp_path / "cli"
    install("claude", destination)
    manifest = json.loads((destination / MANIFEST).read_text())
    manifest["files"][path] = "0" * 64
    (destination / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(EquiportError, match="lies outside"):
        plan_uninstall("claude", destination, force=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vscode"], ["no agent CLI 'vscode'", "claude, kiro"]),
        (["claude", "--uninstall"], ["nothing was installed here", ".claude"]),
        (["claude", "--dest", "file"], ["file"]),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "file").write_text("a file")
    done = deploy(tmp_path, *arguments)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not [word for word in words if word not in done.stderr], done.stderr
    assert files(tmp_path) == {"file": b"a file"}


def test_one_folder_holds_one_kind(tmp_path: Path) -> None:
    install("claude", tmp_path)
    with pytest.raises(EquiportError, match="holds an installation for claude"):
        plan_install("kiro", ROOT, tmp_path, force=False)
