"""Names and shapes of a made block's parameters and of the source's, read in a process of its own.

Run as a module: `python -m equiport.port.unit_shapes '<request as JSON>'` in the unit's folder; the answer is the last
line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equiport.errors import EquiportError
from equiport.port.port_run_units import test_environment


@dataclass(frozen=True)
class ShapesRequest:
    """What to build: `call` is an expression over `config`, `nxdi_block` and `parts`; `source`: a module's path.

    `left_out`: beginnings of names that belong to other units.
    """

    stack: str
    config: dict[str, Any]
    config_class: str
    call: str
    source: str
    attention: str = ""
    fused: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockShapes:
    """Parameter -> shape, of the port's block and of the source's."""

    target: dict[str, tuple[int, ...]]
    source: dict[str, tuple[int, ...]]


def read_shapes(units: Path, unit: str, request: ShapesRequest, timeout: float = 300.0) -> BlockShapes:
    """Build both blocks and read their parameters.

    Raises:
        EquiportError: the block cannot be built; the last line of the traceback is told.
    """
    command = [sys.executable, "-m", "equiport.port.unit_shapes", json.dumps(asdict(request))]
    ended = subprocess.run(
        command, cwd=units / unit, env=test_environment(units, units / unit), capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        raise EquiportError(
            f"cannot be built at its place: {said[-1].strip() if said else 'no output'}", where=unit, field=request.call
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    return BlockShapes(*({name: tuple(shape) for name, shape in found[side].items()} for side in ("target", "source")))


def _answer(request: ShapesRequest) -> dict[str, dict[str, list[int]]]:
    from importlib import import_module

    from equiport.port.translate_world import UnitWorld

    world = UnitWorld(request.stack, request.config)
    sys.path.insert(0, os.getcwd())
    config = world.port_config(getattr(import_module("port_config"), request.config_class))
    names: dict[str, Any] = {"config": config, "nxdi_block": import_module("nxdi_block")}
    if request.attention:
        names["parts"] = import_module("parts")
        config.neuron_config.attn_cls = getattr(names["parts"], request.attention)
    if request.fused:
        config.neuron_config.fused_qkv = True
    block = eval(request.call, names)  # the toolkit's own expression
    source = world.source_module(request.source)

    def kept(tensors: Any) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in tensors if not name.startswith(request.left_out)}

    return {"target": kept(block.named_parameters()), "source": kept(source.state_dict().items())}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(_answer(ShapesRequest(**{**given, "left_out": tuple(given["left_out"])}))))
