"""Closed packages can be imported, decorated with and subclassed; a kernel never runs and is never skipped."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch

from equiport.stacks.contract import StackAdapter


@pytest.fixture(scope="module")
def fabricated(adapter: StackAdapter) -> Any:
    adapter.init_distributed()
    module = importlib.import_module(f"{type(adapter).__module__.rpartition('.')[0]}.fabricated")
    if "nki" not in module.installed_finder().packages:
        pytest.skip("the closed packages are installed here")
    return module


def test_any_submodule_and_name_imports(fabricated: Any) -> None:
    import nki.language as nl
    from nkilib.core.some.deep.place import a_kernel
    from torch_neuronx.xla_impl import anything

    assert isinstance(nl.bfloat16, fabricated.FabricatedSymbol)
    assert "nkilib.core.some.deep.place.a_kernel" in repr(a_kernel)
    assert anything is sys.modules["torch_neuronx.xla_impl"].anything
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nki_of_another_kind")


def test_a_tensor_in_any_place_is_refused(fabricated: Any) -> None:
    from nkilib.core.mlp.mlp import mlp

    x = torch.ones(2)
    calls: list[Any] = [
        lambda: mlp(x),
        lambda: mlp(3, weight=x),
        lambda: mlp[2](x),
        lambda: mlp[(1, 2)]([1, {"a": (x,)}]),
        lambda: mlp("options").run(x),
        lambda: mlp.apply(torch.nn.Parameter(x)),
    ]
    for call in calls:
        with pytest.raises(fabricated.KernelAbsentError, match=r"nkilib\.core\.mlp\.mlp\.mlp"):
            call()
    with pytest.raises(fabricated.KernelAbsentError, match="truth value"):
        bool(mlp(3))
    with pytest.raises(fabricated.KernelAbsentError, match="iterated"):
        list(mlp)
    with pytest.raises(TypeError):
        x + mlp
    with pytest.raises(TypeError):
        torch.where(x > 0, x, mlp)


def test_decorators(fabricated: Any) -> None:
    import nki
    from torch_neuronx.xla_impl.ops import nki_jit, xla_hlo_call

    @xla_hlo_call
    def helper(x: int) -> int:
        return x + 1

    assert helper(1) == 2

    for decorate in (nki.jit, nki.jit(mode="trace"), nki_jit()):

        @decorate
        def a_kernel(x: Any) -> Any:
            return x

        with pytest.raises(fabricated.KernelAbsentError, match="a_kernel"):
            a_kernel(torch.ones(1))


def test_descriptions_for_the_compiler(fabricated: Any) -> None:
    from torch_neuronx.xla_impl.base import xla_hlo_call
    from torch_neuronx.xla_impl.custom_call_targets import AwsNeuronModuleMarkerStartForward, SomeKernel

    @xla_hlo_call
    def marker(*args: Any) -> Any:
        out = args[0] if len(args) == 1 else args[0].scribe.tuple(*args)
        return out.CustomCall(*args, custom_call_target=AwsNeuronModuleMarkerStartForward)

    @xla_hlo_call
    def kernel(x: Any) -> Any:
        return x.CustomCall(x, custom_call_target=SomeKernel)

    @xla_hlo_call
    def slicing(x: Any) -> Any:
        return x.dtype[x.sizes].DynamicSlice(x)

    @xla_hlo_call
    def skipping(x: Any) -> Any:
        return 3

    @xla_hlo_call
    def adding(x: Any) -> Any:
        return x + x

    x, y = torch.ones(2), torch.zeros(3)
    assert marker(x) is x
    assert marker(x, y) == (x, y)
    for wrong in (kernel, slicing, skipping, adding):
        with pytest.raises(fabricated.KernelAbsentError, match=wrong.__name__):
            wrong(x)
    with pytest.raises(fabricated.KernelAbsentError, match="kernel"):
        kernel(x=x)


def test_base_classes(fabricated: Any) -> None:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader
    from torch_xla.somewhere import Base

    class Mine(Base):
        pass

    class Loader(MpDeviceLoader):
        pass

    for made, name in ((Mine, "torch_xla.somewhere.Base"), (Loader, "MpDeviceLoader")):
        with pytest.raises(fabricated.KernelAbsentError, match="instantiated"):
            made()
        assert name in made.__mro__[1]._fabricated_from
    assert not isinstance(3, Base)


def test_symbols_survive_copies(fabricated: Any) -> None:
    from nki.language import bfloat16

    assert copy.deepcopy({"dtype": bfloat16})["dtype"] is bfloat16
    assert copy.copy(bfloat16) is bfloat16


def test_norm_is_the_real_function(fabricated: Any) -> None:
    from torch_neuronx.xla_impl.ops import RmsNorm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 16, generator=generator) * 4
    weight = torch.randn(16, generator=generator)
    wanted = torch.nn.functional.rms_norm(x.double(), (16,), weight.double(), 1e-3)
    torch.testing.assert_close(RmsNorm.apply(x, weight, 1e-3, 2).double(), wanted, rtol=1e-6, atol=1e-6)
    assert RmsNorm.apply(x.bfloat16(), weight, 1e-3, 2).dtype is torch.bfloat16


def test_others_are_told_the_truth(fabricated: Any) -> None:
    from transformers.utils import is_torch_xla_available

    importlib.import_module("torch_xla.core.xla_model")
    assert not is_torch_xla_available()
    assert not is_torch_xla_available(check_is_tpu=True)
    finder = fabricated.FabricatedFinder(["absent_closed_package"])
    asked = {"finder": finder, "__name__": "accelerate.utils.imports"}
    assert eval("finder.find_spec('absent_closed_package')", asked) is None
    assert finder.find_spec("absent_closed_package") is not None
    assert finder.find_spec("numpy") is None


def test_installing_twice_changes_nothing(fabricated: Any) -> None:
    before = list(sys.meta_path)
    assert fabricated.install() == fabricated.installed_finder().packages
    assert sys.meta_path == before
    assert "torch" not in fabricated.install()
