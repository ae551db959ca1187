"""A HuggingFace folder of a port's tiny counterpart, with weights under which faults show."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from equiport.errors import EquiportError
from equiport.fixtures.weights import WeightKind
from equiport.intake.inspection import PortInspection
from equiport.intake.key_layout import layout_read
from equiport.reference.key_layout import declare_layout
from equiport.reference.model import materialize


def source_folder(inspection: PortInspection, folder: Path, *, seed: int = 42) -> Path:
    """Write config.json and perturbed weights (fp32, exact in bf16) of `inspection.tiny` into `folder`; its path.

    Tensors are stored under the names that the port's conversion reads, where transformers loads them as the same
    model; stage 0 says so.

    Raises:
        EquiportError: the port has no tiny config (the obstacle is told), or transformers cannot build it.
    """
    if inspection.tiny is None:
        raise EquiportError(
            inspection.obstacle or "no tiny config is known for it",
            where=inspection.port,
            remedy="Give the model's config with --model.",
        )
    with tempfile.TemporaryDirectory(prefix="equiport-intake-") as work:
        (Path(work) / "config.json").write_text(json.dumps(inspection.tiny, indent=2), encoding="utf-8")
        if inspection.classes is not None:
            declare_layout(Path(work), layout_read(inspection.port, inspection.classes, Path(work)))
        return materialize(Path(work), folder, WeightKind.PERTURBED, seed, tiny=False).folder
