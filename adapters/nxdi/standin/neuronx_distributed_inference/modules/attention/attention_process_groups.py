"""Groups for context- and data-parallel attention: importable, refused when used."""

from neuronx_distributed._standin.missing import attribute_hook, refused_call

__getattr__ = attribute_hook(__name__)

_CP, _DP = "context parallelism", "attention data parallelism"

init_context_parallel_attention_process_groups = refused_call(
    f"{__name__}.init_context_parallel_attention_process_groups", _CP
)
get_context_parallel_attention_cp_group = refused_call(f"{__name__}.get_context_parallel_attention_cp_group", _CP)
get_context_parallel_attention_tp_group = refused_call(f"{__name__}.get_context_parallel_attention_tp_group", _CP)
init_data_parallel_attention_process_groups = refused_call(
    f"{__name__}.init_data_parallel_attention_process_groups", _DP
)
get_data_parallel_attention_dp_group = refused_call(f"{__name__}.get_data_parallel_attention_dp_group", _DP)
get_data_parallel_attention_tp_group = refused_call(f"{__name__}.get_data_parallel_attention_tp_group", _DP)
