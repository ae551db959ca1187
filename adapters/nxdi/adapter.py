"""NxD Inference: makes, loads and runs a port in the stack's CPU mode (seed 003's adapter interface)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.stacks.contract import Generation, LoadReport, ModelLimits, NotOffered, StackAdapter, StackStatus, Tier

from .compiled import load_compiled, rebuild_config
from .cpu_run import decode_step, greedy, prefill
from .environment import installed_roots, resolve_environment
from .graph_memory import memory_notes
from .parallel import CpuParallelState
from .port_config import cpu_neuron_config, inference_config
from .port_module import import_port, port_class
from .weights import load_causal, load_inner


class NxdiAdapter(StackAdapter):
    """Ports that derive from NeuronBaseForCausalLM, NeuronBaseModel and InferenceConfig."""

    name = "nxdi"
    import_roots = ("neuronx_distributed_inference", "neuronx_distributed")

    def __init__(self) -> None:
        self._parallel: CpuParallelState | None = None

    def check_environment(self, *, compiled: bool = False) -> StackStatus:
        """The tier of CPU mode, or, with `compiled`, of a compiled model. Imports none of the stack.

        Raises:
            EquiportError: a source folder was given that cannot be used (the message says why).
        """
        found = resolve_environment()
        if compiled and found.device_present:
            return StackStatus(self.name, Tier.DEVICE, "NxDI", found.version, found.why, device="neuron")
        return StackStatus(self.name, found.tier, "NxDI", found.version, found.why)

    def init_distributed(self, tp_degree: int = 1) -> None:
        """Import path, gloo group and parallel state, once a process; see `CpuParallelState.bring_up`."""
        self._cpu().bring_up(tp_degree)

    def _cpu(self) -> CpuParallelState:
        if self._parallel is None:
            self._parallel = CpuParallelState(resolve_environment())
        return self._parallel

    def create_model(
        self,
        target_module_file: str | Path,
        target_class_name: str,
        target_config_name: str,
        hf_model_path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        batch_size: int = 1,
        seq_len: int = 64,
        tp_degree: int = 1,
        neuron_config: Mapping[str, Any] | None = None,
        **kw: Any,
    ) -> nn.Module:
        """The port's causal-LM application, or its inner model with the weights it was initialised with.

        `neuron_config` holds NeuronConfig settings to add or override.

        Raises:
            EquiportError: the file does not import, lacks a class, the config lacks a field, or the model cannot be
                made.
            NotOffered: an argument this stack does not take.
        """
        if kw:
            raise NotOffered(f"create_model of the nxdi stack takes no {', '.join(sorted(kw))}")
        self.init_distributed(tp_degree)
        if dtype is torch.float16 or (dtype is torch.bfloat16 and tp_degree > 1):
            raise EquiportError(
                f"{dtype} with tp_degree {tp_degree} is not served in CPU mode: gloo cannot reduce it",
                field="dtype",
                remedy="Use float32, or bfloat16 with tp_degree 1.",
            )
        from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

        module = import_port(target_module_file)
        model_class = port_class(module, target_class_name, nn.Module)
        config_class = port_class(module, target_config_name)
        causal = issubclass(model_class, NeuronBaseForCausalLM)
        if not causal and not issubclass(model_class, NeuronBaseModel):
            raise EquiportError(
                f"class {target_class_name!r} derives neither from NeuronBaseForCausalLM nor from NeuronBaseModel",
                where=target_module_file,
                remedy="Name the port's causal-LM or inner model class.",
            )
        settings = cpu_neuron_config(
            config_class,
            model_class if causal else None,
            dtype=dtype,
            batch_size=batch_size,
            seq_len=seq_len,
            tp_degree=tp_degree,
            overrides=neuron_config or {},
        )
        config = inference_config(config_class, settings, hf_model_path)
        try:
            model = model_class(str(hf_model_path), config) if causal else _built(model_class, config)
        except EquiportError:
            raise
        except Exception as fault:
            raise EquiportError(
                f"{target_class_name} cannot be made: {type(fault).__name__}: {fault}",
                where=target_module_file,
                remedy="Check the port's __init__ and init_model against the config.",
            ) from fault
        model._equiport_port = module.__name__
        return model.eval()

    def load_weights(self, model: nn.Module, hf_model_path: str | Path, dtype: torch.dtype) -> LoadReport:
        """Strict load by the port's own conversion: `to_cpu()` of a causal-LM, or for an inner model the conversion
        of the causal-LM class that names it in `_model_cls`.

        Raises:
            EquiportError: missing or damaged weight files, another dtype than the model's, or a conversion that fails.
        """
        self.init_distributed(_settings(model).tp_degree)
        made_for = _settings(model).torch_dtype
        if dtype is not made_for:
            raise EquiportError(
                f"{dtype} weights are asked for, the model was made for {made_for}",
                field="dtype",
                remedy="Give create_model the same dtype.",
            )
        with self._cpu().single_start(), self._cpu().reused_groups(), torch.no_grad():
            if hasattr(model, "to_cpu"):
                return load_causal(model, Path(hf_model_path))
            return load_inner(model, _wrapping_class(model), Path(hf_model_path))

    def forward(
        self,
        model: nn.Module,
        input_ids: Tensor,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        **kw: Any,
    ) -> Tensor:
        """Next-token logits [B, V] float32; see the contract.

        Raises:
            EquiportError: the batch is not the model's, a row does not fit in seq_len, a token is outside the
                vocabulary,
                decode without a prefill, or a model without weights.
            NotOffered: an argument this stack does not take.
        """
        if kw:
            raise NotOffered(f"forward of the nxdi stack takes no {', '.join(sorted(kw))}")
        if positions is not None:
            if lengths is not None:
                raise EquiportError("takes lengths (prefill) or positions (decode), not both", field="forward")
            return decode_step(model, input_ids, positions, self.limits(model))
        if lengths is None:
            lengths = torch.full((input_ids.shape[0],), input_ids.shape[1])
        return prefill(model, input_ids, lengths, self.limits(model))

    def device_inference(
        self, model_id: str, tp_size: int, prompts: Sequence[Sequence[int]], max_tokens: int = 32, **kw: Any
    ) -> list[Generation]:
        """Greedy generation. `model_id` is a compiled folder (device tier only), or a HuggingFace folder: then the
        port is named by `target_module_file`, `target_class_name` and `target_config_name` (`dtype` float32 or
        bfloat16), or given loaded as `model`. `eos_token_ids` end a row early; `tokenizer` gives the text;
        `with_logits` keeps the logits.

        Raises:
            NotOffered: a compiled folder where there is no Neuron device.
            EquiportError: bad input, or weights that did not all arrive.
        """
        folder = Path(model_id)
        if (folder / "neuron_config.json").is_file() or (folder / "model.pt").is_file():
            return self._compiled(folder)
        names = ("target_module_file", "target_class_name", "target_config_name")
        model, dtype = kw.pop("model", None), kw.pop("dtype", torch.bfloat16)
        port = [kw.pop(name, None) for name in names]
        wanted = {name: kw.pop(name) for name in ("eos_token_ids", "tokenizer", "with_logits") if name in kw}
        if kw:
            raise NotOffered(f"device_inference of the nxdi stack takes no {', '.join(sorted(kw))}")
        if not prompts or min(len(prompt) for prompt in prompts) < 1:
            raise EquiportError("an empty prompt", field="prompts", remedy="A prompt has at least one token.")
        if model is None:
            if None in port:
                raise EquiportError(
                    "the port is not named", field="/".join(names), remedy="Give the three, or a loaded model."
                )
            longest = max(len(prompt) for prompt in prompts) + max_tokens
            sizes = {"batch_size": len(prompts), "seq_len": longest, "tp_degree": tp_size}
            model = self.create_model(*port, hf_model_path=folder, dtype=dtype, **sizes)
            report = self.load_weights(model, folder, dtype)
            if not report.clean:
                lost = (*report.missing, *report.unexpected, *report.mis_shaped)
                raise EquiportError(
                    f"weights did not all arrive: {len(report.missing)} missing, {len(report.unexpected)} unexpected, "
                    f"{len(report.mis_shaped)} mis-shaped ({', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''})",
                    where=folder,
                    remedy="Correct the port's weight conversion.",
                )
        return greedy(self, model, prompts, max_tokens, **wanted)

    def _compiled(self, folder: Path) -> list[Generation]:
        status = self.check_environment(compiled=True)
        if status.tier is Tier.DEVICE:
            raise NotOffered(
                "inference on a compiled model is not built into the nxdi adapter",
                where=folder,
                remedy="scripts/nxdi_compiled_loader.py loads it; leave --compiled-model-path out for CPU mode.",
            )
        raise NotOffered(
            f"a compiled model needs a Neuron device, here the tier is {status.tier.value} ({status.why})",
            where=folder,
            remedy="Run where the device is, or leave --compiled-model-path out: the stage then runs in CPU mode.",
        )

    def compiled_config(self, compiled_folder: str | Path, config_class_of: str) -> Any:
        """The InferenceConfig of a compiled folder; `config_class_of` is FILE:CLASS. No device is needed."""
        self._cpu().enter_path()
        return rebuild_config(Path(compiled_folder), config_class_of)

    def compiled_model(self, compiled_folder: str | Path, model_class_of: str, config: Any) -> Any:
        """The compiled model on the device (NotOffered elsewhere); `model_class_of` is FILE:CLASS."""
        return load_compiled(Path(compiled_folder), model_class_of, config, self.check_environment(compiled=True))

    def inner_model(self, model: nn.Module) -> nn.Module:
        """The port's NeuronBaseModel. A causal-LM without weights gets one as it is initialised (random weights)."""
        wrappers = getattr(model, "models", None)
        if not isinstance(wrappers, list) or not wrappers:
            return model
        if wrappers[0].model is None:
            built = _built(model._model_cls, model.config)
            for wrapper in wrappers:
                wrapper.model = built
        inner: nn.Module = wrappers[0].model
        return inner

    def run_notes(self, model: nn.Module) -> tuple[str, ...]:
        """States of the port that calls so far have dropped, or carried by its own aliases, as a device does."""
        return memory_notes(self.inner_model(model))

    def limits(self, model: nn.Module) -> ModelLimits:
        """Batch size and seq_len of the model's NeuronConfig."""
        return ModelLimits(batch_size=_settings(model).batch_size, seq_len=_settings(model).seq_len)

    def import_port(self, modeling_file: str | Path) -> ModuleType:
        """The port's module; the stack is put on the import path first."""
        self.init_distributed()
        return import_port(modeling_file)

    def source_roots(self) -> tuple[Path, ...]:
        """The folders on the import path that hold `neuronx_distributed*` in this tier."""
        found = resolve_environment()
        return found.paths or installed_roots()

    def cleanup(self) -> None:
        """Destroy the parallel state and the group, and restore the environment variables."""
        if self._parallel is not None:
            self._parallel.tear_down()
            self._parallel = None


def _settings(model: nn.Module) -> Any:
    return model.config.neuron_config  # type: ignore[union-attr]


def _built(inner_class: Any, config: Any) -> nn.Module:
    inner: nn.Module = inner_class(config)
    if config.neuron_config.torch_dtype is torch.bfloat16:
        inner.bfloat16()
    return inner.eval()


def _wrapping_class(inner: Any) -> Any:
    """The one class of the port that names the inner model's class as its own `_model_cls`."""
    modules = {type(inner).__module__, getattr(inner, "_equiport_port", type(inner).__module__)}
    classes = {
        value
        for name in modules
        for value in vars(sys.modules[name]).values()
        if inspect.isclass(value) and value.__dict__.get("_model_cls") is type(inner)
    }
    if len(classes) != 1:
        raise EquiportError(
            f"{len(classes)} classes name {type(inner).__name__} as their _model_cls, one has to",
            where=getattr(sys.modules[type(inner).__module__], "__file__", "") or "",
            remedy="Load through the causal-LM class: its conversion is what makes the weights fit.",
        )
    return classes.pop()
