"""The source model (HuggingFace): loaded in a dtype, run for logits, greedy tokens and module inputs and outputs."""
