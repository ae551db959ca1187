"""Which stack a port is written for, from its imports; never a silent default."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from equiport.errors import EquiportError
from equiport.stacks.contract import StackAdapter
from equiport.stacks.loading import ENTRY_POINT_GROUP, known_stacks
from equiport.stacks.source_reading import with_siblings

# In order of precedence: a vLLM-Neuron port may also import building blocks of the other stack.
_IMPORT_ROOTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("vllm_neuron", ("vllm_neuron",)),
    ("nxdi", ("neuronx_distributed_inference", "neuronx_distributed")),
)


def detect_stack(modeling_file: str | Path, target_stack: str | None = None) -> str:
    """The stack's name. An explicit `target_stack` wins; otherwise the imports of the file (and of its siblings) say
    it.

    Raises:
        EquiportError: the file is unreadable, or it imports no known stack.
    """
    if target_stack:
        if target_stack in known_stacks() or Path(target_stack).expanduser().exists():
            return target_stack
        raise EquiportError(
            f"unknown stack {target_stack!r}",
            field="target_stack",
            remedy=f"Known stacks: {', '.join(known_stacks()) or 'none'}; or give the path of an adapter file.",
        )
    roots = {
        module.partition(".")[0]
        for source in with_siblings(modeling_file)
        for module, level in source.modules
        if level == 0
    }
    for stack, names in (*_third_party_roots(), *_IMPORT_ROOTS):
        if roots & set(names):
            return stack
    raise EquiportError(
        "imports no known serving stack",
        where=modeling_file,
        field="target_stack",
        remedy=f"Say which stack it is for with --target-stack (one of {', '.join(known_stacks())}, or a path).",
    )


def _third_party_roots() -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            adapter = point.load()
        except (
            Exception
        ):  # a broken third-party package must not hide the bundled stacks; loading it by name reports it
            continue
        if isinstance(adapter, type) and issubclass(adapter, StackAdapter) and adapter.import_roots:
            found.append((point.name, tuple(adapter.import_roots)))
    return found
