"""A port's three classes are found by their bases, without importing the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from equiport.content import content_dir
from equiport.errors import EquiportError, ExitCode, OpenQuestionError
from equiport.stacks.port_classes import PortClasses, find_port_classes

HEAD = """
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
import a_package_that_is_not_installed
"""
PLAIN = (
    HEAD
    + """
class XConfig(InferenceConfig): pass
class XModel(NeuronBaseModel): pass
class XForCausalLM(NeuronBaseForCausalLM):
    _model_cls = XModel
"""
)


def found(tmp_path: Path, source: str, **given: str) -> tuple[str, str, str]:
    path = tmp_path / "modeling_x.py"
    path.write_text(source)
    classes = find_port_classes(path, **given)
    assert classes.modeling_file == path
    return classes.inner, classes.causal, classes.config


def test_example() -> None:
    path = content_dir("examples") / "llama" / "modeling_llama_nxdi.py"
    expected = PortClasses(path, "NeuronLlamaModel", "NeuronLlamaForCausalLM", "LlamaInferenceConfig")
    assert find_port_classes(path) == expected


def test_by_direct_bases(tmp_path: Path) -> None:
    assert found(tmp_path, PLAIN) == ("XModel", "XForCausalLM", "XConfig")


def test_indirect_and_dotted_bases(tmp_path: Path) -> None:
    source = """
import neuronx_distributed_inference.models.model_base as mb
from neuronx_distributed_inference.models import config
from torch import nn
class XConfig(config.InferenceConfig): pass
class Mixin: pass
class Core(mb.NeuronBaseModel): pass
class XModel(Mixin, Core): pass
class Layer(nn.Module): pass
class XForCausalLM(mb.NeuronBaseForCausalLM):
    _model_cls: type = XModel
"""
    assert found(tmp_path, source) == ("XModel", "XForCausalLM", "XConfig")


def test_bases_of_the_stacks_own_library(tmp_path: Path) -> None:
    source = """
from neuronx_distributed_inference.models.llama.modeling_llama import (
    LlamaInferenceConfig, NeuronLlamaForCausalLM, NeuronLlamaModel as Base)
class YConfig(LlamaInferenceConfig): pass
class YModel(Base): pass
class Y(NeuronLlamaForCausalLM):
    _model_cls = YModel
"""
    assert found(tmp_path, source) == ("YModel", "Y", "YConfig")


def test_bases_in_a_sibling_file(tmp_path: Path) -> None:
    (tmp_path / "base_x.py").write_text(PLAIN)
    source = """
from base_x import XConfig, XModel, XForCausalLM as Old
class ZConfig(XConfig): pass
class ZModel(XModel): pass
class Z(Old):
    _model_cls = ZModel
"""
    assert found(tmp_path, source) == ("ZModel", "Z", "ZConfig")


def test_causal_class_leads_to_the_others(tmp_path: Path) -> None:
    source = (
        PLAIN
        + """
class DraftModel(NeuronBaseModel): pass
class DraftConfig(XConfig): pass
class Second(NeuronBaseForCausalLM):
    _model_cls = DraftModel
    @classmethod
    def get_config_cls(cls): return DraftConfig
"""
    )
    with pytest.raises(OpenQuestionError, match="XForCausalLM, Second.*--causal-class") as raised:
        found(tmp_path, source)
    assert raised.value.exit_code is ExitCode.INCONCLUSIVE
    assert found(tmp_path, source, causal_class="Second") == ("DraftModel", "Second", "DraftConfig")
    with pytest.raises(OpenQuestionError, match="XConfig, DraftConfig.*--config-class"):
        found(tmp_path, source, causal_class="XForCausalLM")
    given = {"causal_class": "XForCausalLM", "config_class": "XConfig"}
    assert found(tmp_path, source, **given) == ("XModel", "XForCausalLM", "XConfig")
    assert found(tmp_path, source, inner_class="DraftModel", **given)[0] == "DraftModel"


def test_several_inner_classes(tmp_path: Path) -> None:
    source = PLAIN.replace("    _model_cls = XModel", "    pass") + "class Other(NeuronBaseModel): pass\n"
    with pytest.raises(OpenQuestionError, match="XModel, Other.*--inner-class"):
        found(tmp_path, source)


def test_missing_classes(tmp_path: Path) -> None:
    with pytest.raises(EquiportError, match="no class derives from NeuronBaseForCausalLM.*--causal-class"):
        found(tmp_path, PLAIN.split("class XForCausalLM")[0])
    with pytest.raises(EquiportError, match="has no class 'Nope'.*XConfig, XModel, XForCausalLM"):
        found(tmp_path, PLAIN, inner_class="Nope")
    with pytest.raises(EquiportError, match="is not Python"):
        found(tmp_path, "class (:")


def test_a_class_named_alike_is_not_taken(tmp_path: Path) -> None:
    source = PLAIN + "class NeuronFakeModel: pass\nclass FakeInferenceConfig(NeuronFakeModel): pass\n"
    assert found(tmp_path, source) == ("XModel", "XForCausalLM", "XConfig")


def test_classes_that_derive_from_each_other_end(tmp_path: Path) -> None:
    assert found(tmp_path, PLAIN + "class A(B): pass\nclass B(A): pass\n") == ("XModel", "XForCausalLM", "XConfig")


LIBRARY = """
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.mixtral.modeling_mixtral import NeuronMixtralForCausalLM as Base
class MyConfig(InferenceConfig): pass
class NeuronMixtralForCausalLM(Base):
    @classmethod
    def get_config_cls(cls):
        return MyConfig
"""


def test_the_inner_class_of_a_library_model(tmp_path: Path) -> None:
    names = ("NeuronMixtralModel", "NeuronMixtralForCausalLM", "MyConfig")
    assert found(tmp_path, LIBRARY) == names
    file = tmp_path / "modeling_named.py"
    file.write_text(LIBRARY)
    given = find_port_classes(file, inner_class=names[0], causal_class=names[1], config_class=names[2])
    assert (given.inner, given.causal, given.config) == names
    with pytest.raises(EquiportError, match="has no class 'NeuronLlamaModel'"):
        find_port_classes(file, inner_class="NeuronLlamaModel", causal_class=names[1])


def test_the_stacks_own_config_where_the_port_has_none(tmp_path: Path) -> None:
    source = PLAIN.replace("class XConfig(InferenceConfig): pass", "")
    assert found(tmp_path, source) == ("XModel", "XForCausalLM", "InferenceConfig")


def test_a_config_class_that_is_returned_but_defined_nowhere(tmp_path: Path) -> None:
    source = PLAIN + "    @classmethod\n    def get_config_cls(cls):\n        return XConfigOfAnotherName\n"
    assert found(tmp_path, source) == ("XModel", "XForCausalLM", "XConfig")
