"""A stack as small as can be: a port is a function that makes target tensors of source tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from equiport.stacks.contract import LoadReport, StackAdapter, StackStatus, Tier
from equiport.stacks.port_classes import PortClasses
from equiport.structure.provenance import Provenance, trace_provenance

State = dict[str, Tensor]


class FakeStack(StackAdapter):
    """`convert` is the port's conversion; its result's names and shapes are the port's parameters."""

    name = "fake"

    def __init__(self, convert: Callable[[State], State]) -> None:
        self.convert = convert

    def check_environment(self, *, compiled: bool = False) -> StackStatus:
        return StackStatus("fake", Tier.STAND_IN, "fake", "1", "a test")

    def init_distributed(self, tp_degree: int = 1) -> None:
        return None

    def create_model(self, target_module_file: Any, target_class_name: str, target_config_name: str,
                     hf_model_path: Any, **kw: Any) -> nn.Module:  # fmt: skip
        root = nn.Module()
        for name, value in self.convert(load_file(Path(hf_model_path) / "model.safetensors")).items():
            *path, last = name.split(".")
            holder = root
            for part in path:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = getattr(holder, part)
            holder.register_parameter(last, nn.Parameter(torch.zeros_like(value), requires_grad=False))
        return root

    def load_weights(self, model: nn.Module, hf_model_path: Any, dtype: torch.dtype) -> LoadReport:
        state = self.convert(load_file(Path(hf_model_path) / "model.safetensors"))
        model.load_state_dict(state)
        return LoadReport(tuple(state))

    def forward(self, model: nn.Module, input_ids: Tensor, **kw: Any) -> Tensor:
        raise AssertionError("provenance runs no forward")

    def device_inference(self, *_: Any, **kw: Any) -> list[Any]:
        raise AssertionError("provenance runs no generation")

    def inner_model(self, model: nn.Module) -> nn.Module:
        return model


def provenance_of(folder: Path, shapes: dict[str, tuple[int, ...]], convert: Callable[[State], State]) -> Provenance:
    """Trace a conversion of a checkpoint with the given tensor shapes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    classes = PortClasses(Path("port.py"), "Inner", "Causal", "Config")
    return trace_provenance(FakeStack(convert), Path("port.py"), classes, folder)
