"""Components whose class runs on the CPU alone: a rounding of theirs says nothing of the device's class.

The stack picks some classes by its CPU mode (norms above all). Where such a class is exact in fp32 and coarser than the
source in bf16, what rounds is a module that the device never builds, and the device's own is closed: neither FAIL nor
PASS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isinf

from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.experiment import Experiment
from equiport.experiment.atomic import read_json
from equiport.stages.component_rows import ComponentRow
from equiport.stages.instances import InstanceRow
from equiport.structure.mapping import ComponentMapping
from equiport.structure.tree import read_classes

_NOTHING = "(nothing)"


def device_classes(experiment: Experiment, mapping: ComponentMapping) -> dict[str, str]:
    """Component -> the class that stands there on the device, where every instance is of a class of CPU mode alone.

    Read from the trees and the class divergences that stage 0 left; empty where it left none.
    """
    report = experiment.root / "class_divergence_report.json"
    found = read_json(report) if report.is_file() else []
    on_device = {item["device_class"] for item in found}
    instead = {
        item["cpu_class"]: item["device_class"]
        for item in found
        if item["cpu_class"] not in on_device and item["device_class"] != _NOTHING
    }
    classes = read_classes(experiment.model_tree, "target")
    result = {}
    for entry in mapping.components:
        own = {classes.get(path, "") for _, paths, _ in entry.instances() for path in paths}
        if len(own) == 1 and own <= instead.keys():
            result[entry.name] = instead[own.pop()]
    return result


def settle_device_classes(
    rows: Sequence[ComponentRow],
    instances: Sequence[InstanceRow],
    on_device: Mapping[str, str],
    thresholds: Thresholds,
) -> list[ComponentRow]:
    """`rows`, with those that only round more than their source as INCONCLUSIVE, where that is a class of CPU mode.

    A component that holds such a one and only rounds more itself is undecided with it: what rounds in it may be that.
    """
    by_component: dict[str, list[InstanceRow]] = defaultdict(list)
    for item in instances:
        by_component[item.component].append(item)
    coarse = {name for name, own in by_component.items() if _only_coarse(own, thresholds)}
    failing = {row.component for row in rows if row.verdict is Verdict.FAIL}
    unsure = {name: on_device[name] for name in failing & coarse & on_device.keys()}
    held = {
        name: f"{device} in {inner}"
        for name in failing & coarse - unsure.keys()
        for inner, device in unsure.items()
        if inner.startswith(name + ".")
    }
    unsure |= held
    return [
        row.model_copy(update={"verdict": Verdict.INCONCLUSIVE, "device_class": unsure[row.component]})
        if row.component in unsure and row.verdict is Verdict.FAIL
        else row
        for row in rows
    ]


def _only_coarse(instances: Sequence[InstanceRow], thresholds: Thresholds) -> bool:
    """Compared in fp32 everywhere, and within the gate there."""
    return all(
        item.r32 is not None
        and item.r32 < thresholds.r32_pooled
        and (item.r32_slice is None or item.r32_slice < thresholds.r32_slice)
        and not isinf(item.excess)
        for item in instances
    )
