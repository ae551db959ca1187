"""Names that rules know: the toolkit's comparators, serving stacks, and what ports may borrow from transformers."""

from __future__ import annotations

STACK_ROOTS = frozenset(
    {"neuronx_distributed_inference", "neuronx_distributed", "vllm_neuron", "torch_neuronx", "nki", "neuronxcc"}
)

_COMPARE = (
    "compare_3tensors", "compare_2tensors", "check_3tensor_result", "compare_logits", "component_gate", "smoke_gate",
    "end_to_end_gate", "three_way_gate", "fp32_gate", "exact_gate",
)  # fmt: skip
#: Compares two or three tensors given as arguments, the reference first.
TENSOR_COMPARATORS = frozenset(
    f"{module}.{name}"
    for module in ("equiport.compare", "tensor_compare", "equiport.compare.threeway", "equiport.compare.twoway")
    for name in ("compare_3tensors", "compare_2tensors", "compare_logits")
)
#: Gives the verdict on what a tensor comparator measured.
VERDICTS = frozenset(
    {
        "equiport.compare.check_3tensor_result", "tensor_compare.check_3tensor_result",
        "equiport.compare.check.check_3tensor_result",
        "equiport.stages.component_check.check_components", "equiport.compare.component_gate",
    }
)  # fmt: skip
#: Takes samples that the pipeline traced from both sides.
SAMPLE_COMPARATORS = frozenset({"equiport.stages.component_check.compare_sample"})
#: Builds, runs and compares both blocks; raises when they differ.
BLOCK_TESTS = frozenset(
    {
        "block_testing_utils.test_block_correctness",
        "equiport.port.translate_block_test.test_block_correctness",
    }
)
#: Raise when two tensors differ.
ASSERTING = frozenset(
    {
        "torch.testing.assert_close", "torch.testing.assert_allclose", "numpy.testing.assert_allclose",
        "numpy.testing.assert_array_equal", "numpy.testing.assert_array_almost_equal",
        "torch_neuronx.testing.assert_close",
    }
)  # fmt: skip
#: Give a truth value about two tensors.
PREDICATES = frozenset({"torch.allclose", "torch.equal", "torch.isclose", "numpy.allclose", "numpy.array_equal"})
TOLERANT = ASSERTING | PREDICATES

TOOLKIT_FILES = ("tensor_compare.py", "block_testing_utils.py")
TOOLKIT_FUNCTIONS = frozenset(
    {*_COMPARE, "test_block_correctness", "compare_sample", "check_components", "assert_close", "assert_allclose"}
)

#: What `from module import *` brings, as far as rules care.
STARRED: dict[str, tuple[str, ...]] = {
    "tensor_compare": _COMPARE,
    "equiport.compare": _COMPARE,
    "block_testing_utils": ("test_block_correctness", "BlockResult"),
    "torch.testing": ("assert_close", "assert_allclose"),
    "torch": ("allclose", "equal", "isclose", "load", "save", "empty", "Tensor"),
}

#: Ends of names in transformers that hold no computation of a model.
NEUTRAL_ENDS = (
    "Config", "Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor", "ImageProcessor", "Output",
    "OutputWithPast", "Cache", "Criteria", "LogitsProcessorList", "Streamer",
)  # fmt: skip
_NEUTRAL_MODULES = (
    "transformers.utils", "transformers.modeling_outputs", "transformers.cache_utils",
    "transformers.configuration_utils",
    "transformers.generation", "transformers.file_utils", "transformers.tokenization_utils",
    "transformers.modeling_rope",
    "transformers.integrations", "transformers.processing_utils", "transformers.image_utils",
    "transformers.dynamic_module",
    "transformers.masking_utils", "transformers.feature_extraction",
)  # fmt: skip
#: Ends of names that are leaves: modules without submodules that stacks borrow where their own need a device.
LEAF_ENDS = (
    "Norm", "LayerNorm", "RotaryEmbedding", "Activation", "Conv1D", "ScaledWordEmbedding", "PositionalEmbedding",
    "PositionEmbedding", "SinusoidalPositionalEmbedding",
)  # fmt: skip
_LEAF_NAMES = frozenset({"ACT2FN", "ACT2CLS", "get_activation", "rotate_half", "apply_rotary_pos_emb", "repeat_kv",
                         "ROPE_INIT_FUNCTIONS"})  # fmt: skip


def hf_kind(dotted: str) -> str:
    """What a name of transformers is: "neutral", "leaf", "block" (it computes a model); empty: not of transformers."""
    if not dotted.startswith("transformers."):
        return ""
    parts = dotted.split(".")
    for index, part in enumerate(parts[1:], 1):
        if part in _LEAF_NAMES:
            return "leaf"
        if part[:1].isupper():
            if part.startswith("Auto"):
                return "block" if part.startswith(("AutoModel", "AutoBackbone")) else "neutral"
            if part.endswith(NEUTRAL_ENDS) or "ModelOutput" in part or part in ("PreTrainedModel", "GenerationMixin"):
                return "neutral"
            if part.endswith(LEAF_ENDS) or ".activations" in dotted:
                return "leaf"
            return "block"
        if index == len(parts) - 1:
            break
    if any(dotted.startswith(module) for module in _NEUTRAL_MODULES) or dotted.startswith("transformers.activations"):
        return "neutral"
    # a module, or a function of a modeling file
    return "block" if ".modeling_" in dotted and not parts[-1].startswith("modeling_") else "neutral"
