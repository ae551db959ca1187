"""test_block_correctness: right blocks pass, wrong ones and unsynchronised ones do not. State, weights, deviations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.experiment.atomic import write_text
from equiport.port.port_run import deviations
from equiport.port.state import STATE_NAME, StateFile, key_of
from equiport.port.translate_block_test import test_block_correctness as correct


class Source(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 64, bias=False), nn.Linear(64, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))


class Port(nn.Module):
    act = staticmethod(torch.nn.functional.silu)

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 64, bias=False), nn.Linear(64, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down(self.act(self.up(x))), None


class WrongPort(Port):
    act = staticmethod(torch.nn.functional.gelu)


class LowPrecisionPort(Port):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        hidden = self.up(x)
        return self.down((hidden.half().to(torch.float8_e4m3fn).to(hidden.dtype)).sigmoid() * hidden), None


NAMES = {"up.weight": "first.weight", "down.weight": "second.weight"}


def test_a_right_block_passes_and_says_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    result = correct(Port, Source, NAMES, hidden_size=48)
    assert result.passed and result.max_abs_fp32 < 1e-5
    line = capsys.readouterr().out
    assert line.startswith("PASS Port: 1 calls") and "within atol 0.001" in line


def test_every_input_is_used() -> None:
    inputs = [torch.randn(2, 5, 48), torch.randn(1, 7, 48)]
    assert len(correct(Port, Source, NAMES, test_inputs=inputs).comparisons) == 2


@pytest.mark.parametrize("block", [WrongPort, LowPrecisionPort])
def test_a_wrong_block_fails(block: type[nn.Module]) -> None:
    with pytest.raises(AssertionError, match=rf"FAIL {block.__name__}"):
        correct(block, Source, NAMES, hidden_size=48, verbose=False)


def test_swapped_inputs_fail() -> None:
    with pytest.raises(AssertionError, match="FAIL"):
        correct(Port, Source, NAMES, test_inputs=[torch.ones(2, 5, 48)], reference_inputs=[torch.randn(2, 5, 48)])


def test_bad_calls_are_named() -> None:
    with pytest.raises(EquiportError, match=r"synchronised by nothing: down\.weight"):
        correct(Port, Source, {"up.weight": "first.weight"}, hidden_size=48)
    with pytest.raises(EquiportError, match=r"no such parameter: gate\.weight \(port\)"):
        correct(Port, Source, {**NAMES, "gate.weight": "first.weight"}, hidden_size=48)
    with pytest.raises(EquiportError, match=r"up\.weight has shape \[64, 48\], second\.weight \[48, 64\]"):
        correct(Port, Source, {"up.weight": "second.weight", "down.weight": "first.weight"}, hidden_size=48)
    with pytest.raises(EquiportError, match="1 inputs for the port and 2 for the source"):
        correct(Port, Source, NAMES, test_inputs=[torch.ones(1, 2, 48)], reference_inputs=[torch.ones(1, 2, 48)] * 2)
    with pytest.raises(EquiportError, match="test_inputs: no inputs"):
        correct(Port, Source, NAMES)


def test_a_function_may_synchronise_what_renaming_cannot() -> None:
    class Turned(Port):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 48, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return self.down(self.act(x @ self.up.weight)), None

    def sync(port: nn.Module, source: nn.Module) -> None:
        port.up.weight.data.copy_(source.first.weight.t())

    assert correct(Turned, Source, {"down.weight": "second.weight"}, hidden_size=48, sync_weights_fn=sync).passed


def test_a_step_is_repeated_only_when_something_changed(tmp_path: Path) -> None:
    def state() -> StateFile:
        return StateFile(tmp_path, model=Path("/m"), stack="nxdi", engine="recipes")

    made = write_text(tmp_path / "src" / "a.py", "one")
    key = key_of("plan", {"b": 2}, made)
    state().done("scaffold", key, [made], 1.0, "a.py")
    assert state().is_done("scaffold", key)
    assert not state().is_done("scaffold", key_of("plan", {"b": 3}, made))
    made.write_text("two")
    assert not state().is_done("scaffold", key)
    state().failed("weights", key, 1.0, "three tensors are missing")
    assert not state().is_done("weights", key)
    stored = json.loads((tmp_path / STATE_NAME).read_text())
    assert [*stored["steps"]] == ["scaffold", "weights"] and stored["steps"]["weights"]["status"] == "failed"


def test_a_folder_of_another_port_or_a_damaged_state_is_refused(tmp_path: Path) -> None:
    StateFile(tmp_path, model=Path("/m"), stack="nxdi", engine="recipes").failed("plan", "k", 0.0, "x")
    with pytest.raises(EquiportError, match="holds a port of /m to nxdi"):
        StateFile(tmp_path, model=Path("/other"), stack="nxdi", engine="recipes")
    (tmp_path / STATE_NAME).write_text('{"schema_version": 2}')
    with pytest.raises(EquiportError, match=r"port_state\.json: schema_version: is no port state"):
        StateFile(tmp_path, model=Path("/m"), stack="nxdi", engine="recipes")


def test_deviations_are_collected() -> None:
    source = "x = 1\n    # DEVIATION: the long factors\n    # serve all.\n    y = 2  # plain\n# DEVIATION: another\n"
    assert deviations(source) == ("the long factors serve all.", "another")
