"""A result holds while everything that it was made from stands as it was; nothing else is fresh."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from worlds import World

from equiport.errors import EquiportError, PrerequisiteError
from equiport.experiment import BackendStamp

ALL = (0, 1, 2, 5, 6)


def stale(world: World) -> tuple[int, ...]:
    experiment = world.experiment
    return tuple(stage for stage in ALL if not experiment.freshness(stage).fresh)


def append(world: World, name: str, text: str) -> None:
    with (world.root / name).open("a") as stream:
        stream.write(text)


def flip_a_weight(world: World) -> None:
    file = world.model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def add_shard(world: World) -> None:
    (world.model / "extra.safetensors").write_bytes((world.model / "model.safetensors").read_bytes())


def package(world: World) -> None:
    folder = world.port.parent / "blocks"
    folder.mkdir()
    (folder / "norm.py").write_text("x = 1\n")
    append(world, "port/modeling_llama_nxdi.py", "\n\ndef late():\n    from blocks import norm\n    return norm\n")
    for stage in ALL:  # as if the stages had run with it
        from equiport.experiment.hashing import hash_inputs, port_files

        inputs = {**world.result(stage)["inputs"], **hash_inputs(port_files(world.port), world.exp)}
        world.edit_result(stage, inputs=inputs)
    assert stale(world) == ()
    (folder / "norm.py").write_text("x = 2\n")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda world: None, ()),
        (lambda world: append(world, "port/modeling_llama_nxdi.py", "\n# touched\n"), ALL),
        (lambda world: append(world, "port/sibling.py", "x = 1\n"), ALL),
        (lambda world: world.port.unlink(), None),
        (package, ALL),
        (flip_a_weight, ALL),
        (add_shard, ALL),
        (lambda world: append(world, "model/config.json", " "), ALL),
        (lambda world: append(world, "exp/component_mapping.json", " "), (0, 2)),
        (lambda world: append(world, "exp/tests/test_00_norm.py", "\n"), (2,)),
        (lambda world: append(world, "exp/tests/test_99_mine.py", "\n"), (2,)),
        (lambda world: (world.exp / "tests" / "test_00_norm.py").unlink(), (2,)),
        (lambda world: append(world, "exp/results/teacher_forced.json", " "), (6,)),
        (lambda world: append(world, "exp/EQUIVALENCE_REPORT.md", "x"), ()),
    ],
)
def test_what_a_change_makes_stale(
    done: World, change: Callable[[World], None], expected: tuple[int, ...] | None
) -> None:
    change(done)
    if expected is None:
        with pytest.raises(EquiportError, match="TARGET_MODELING_FILE: .* does not exist"):
            stale(done)
    else:
        assert stale(done) == expected


def test_the_reason_names_the_file(done: World) -> None:
    append(done, "exp/tests/test_00_norm.py", "\n")
    append(done, "port/sibling.py", "x = 1\n")
    changed = done.experiment.freshness(2).changed
    assert "tests/test_00_norm.py" in changed
    assert any(name.endswith("sibling.py (new)") for name in changed)


def test_a_result_of_another_port_is_not_this_experiments(done: World) -> None:
    other = done.root / "other" / "modeling_llama_nxdi.py"
    other.parent.mkdir()
    other.write_text(done.port.read_text())
    from equiport.experiment.hashing import sha256

    inputs = {name: value for name, value in done.result(5)["inputs"].items() if name != str(done.port)}
    done.edit_result(5, inputs={**inputs, str(other): sha256(other)})
    assert done.experiment.freshness(5).changed == (f"{done.port} (new)",)


def test_another_version_or_backend(done: World) -> None:
    backend = BackendStamp.model_validate(done.result(1)["backend"])
    assert done.experiment.freshness(1, backend).fresh
    assert not done.experiment.freshness(1, backend.model_copy(update={"kind": "real"})).fresh
    done.edit_result(1, tool_version="0.0.0")
    assert "equiport 0.0.0" in done.experiment.freshness(1).changed[0]


def test_needs(done: World) -> None:
    assert done.experiment.require(5, {2: True}, force=False) is False
    done.edit_result(2, verdict="FAIL")
    with pytest.raises(PrerequisiteError, match="stage 2 is FAIL, PASS is needed"):
        done.experiment.require(5, {2: True}, force=False)
    assert done.experiment.require(5, {2: False}, force=False) is False
    assert done.experiment.require(5, {2: True}, force=True) is True
    (done.exp / "results" / "stage2.json").unlink()
    with pytest.raises(PrerequisiteError, match="stage 2 has not run.*--force"):
        done.experiment.require(5, {2: False}, force=False)
    assert not done.experiment.freshness(2).exists


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is no JSON"), ("[]", "is no stage result"), ('{"stage": 2, "verdict": "GREAT"}', "verdict: is no stage")],
)
def test_a_damaged_result(done: World, content: str, message: str) -> None:
    (done.exp / "results" / "stage2.json").write_text(content)
    with pytest.raises(EquiportError, match=rf"stage2\.json: .*{message}.*Run the stage again"):
        done.experiment.result(2)


def test_the_stored_schema(done: World) -> None:
    for stage in ALL:
        result = json.loads((done.exp / "results" / f"stage{stage}.json").read_text())
        assert {"schema_version", "stage", "verdict", "reasons", "metrics", "inputs", "backend", "seeds", "started",
                "seconds", "tool_version"} <= set(result)  # fmt: skip
        assert result["stage"] == stage
        assert result["backend"]["kind"] == "stand-in" and result["backend"]["device"] == "cpu"
        assert all(len(digest) == 64 for digest in result["inputs"].values())
