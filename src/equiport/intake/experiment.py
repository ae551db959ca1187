"""The source model of an experiment: the user's folder, or a config of which weights are drawn."""

from __future__ import annotations

from pathlib import Path

from equiport.errors import EquiportError
from equiport.experiment.atomic import write_json
from equiport.intake.inspection import PortInspection
from equiport.intake.key_layout import layout_read
from equiport.intake.kinds import SCOPE, PortKind
from equiport.reference.key_layout import declare_layout

SOURCE = "source"


def check_runnable(inspection: PortInspection) -> None:
    """That the stages can run on the port.

    Raises:
        EquiportError: they cannot: its kind, and what stands against it, in one line.
    """
    if inspection.obstacle is None and inspection.tiny is not None and inspection.classes is not None:
        return
    kind = inspection.kind
    what = f"{kind.value} port: {inspection.obstacle or 'no config is known to make a model of'}"
    remedy = "`equiport inspect` says more."
    if kind is PortKind.EMBEDDING:
        remedy = f"Embeddings are {SCOPE[kind][1][0]}."
    raise EquiportError(what, where=inspection.port, remedy=remedy)


def write_source(inspection: PortInspection, root: Path) -> Path:
    """Write the tiny config into EXP_DIR/source, a folder with a config alone; its path.

    Stage 0 draws weights for it, and the headline says "synthetic weights". Beside it stands under which names they are
    stored, where the port's conversion does not read those of `save_pretrained`.

    Raises:
        EquiportError: the port cannot be run (`check_runnable`), or the folder cannot be written.
    """
    check_runnable(inspection)
    folder = root / SOURCE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EquiportError(
            f"cannot be made: {error.strerror}", where=folder, field="--out", remedy="Choose another folder."
        ) from None
    assert inspection.tiny is not None and inspection.classes is not None
    write_json(folder / "config.json", inspection.tiny)
    declare_layout(folder, layout_read(inspection.port, inspection.classes, folder))
    return folder
