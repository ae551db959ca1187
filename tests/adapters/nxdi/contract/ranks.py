"""One rank of a served Llama, then of a mixture of experts.

`ranks.py tier tp_degree folder out`, with RANK, WORLD_SIZE and the address set.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from tiers import put_on_path


def main(tier: str, tp_degree: str, folder: str, out: str) -> None:
    """Rank 0 writes the session's logits."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["NXD_CPU_MODE"] = "1"
    put_on_path(tier)
    from cases_hub import folder as hub_folder
    from cases_hub import hub
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed_inference.models.llama.modeling_llama import LlamaInferenceConfig, NeuronLlamaForCausalLM
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
    from sessions import session
    from world import served

    # Fused projections and a vocabulary cut over the ranks: the most that sharding can be asked for.
    flags = served(tp_degree=int(tp_degree), fused_qkv=True, vocab_parallel=True)
    config = LlamaInferenceConfig(flags, load_config=load_pretrained_config(folder))
    model = NeuronLlamaForCausalLM(folder, config)
    model.to_cpu()
    with torch.no_grad():
        found = session(model, steps=2)
        # A process serves one model at a time: the groups are made anew, elsewhere.
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        blocks = {"blockwise_matmul_config": {"block_size": 4}}
        experts = hub("qwen3_moe", hub_folder("qwen3_moe"), started=True, tp_degree=int(tp_degree), **blocks)
        found.update({f"moe {step}": value for step, value in session(experts, steps=2).items()})
    if os.environ["RANK"] == "0":
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
