"""Which experts a token goes to, and how much each counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_group

__getattr__ = attribute_hook(__name__)

Routing = tuple[Tensor, Tensor, Tensor]


class RouterBase(nn.Module, ABC):
    """A linear layer over the hidden state, in a dtype of its own, and what becomes of its logits.

    Raises:
        ValueError: top_k is not in 1..num_experts, or act_fn is neither sigmoid nor softmax.
        StandInRefused: sequence parallelism.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
        apply_act_fn_over_topk: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"Invalid top_k={top_k} for num_experts={num_experts}")
        if act_fn not in ("sigmoid", "softmax"):
            raise ValueError("act_fn must be either 'sigmoid' or 'softmax'")
        if sequence_parallel_enabled:
            refuse("a router with sequence_parallel_enabled=True", "sequence parallelism")
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.act_fn, self.dtype, self.device, self.bias = act_fn, dtype, device, bias
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension
        self.jitter_eps = jitter_eps
        self.store_transposed_weights = store_transposed_weights
        self.apply_act_fn_over_topk = apply_act_fn_over_topk
        group = tensor_model_parallel_group
        self.tensor_parallel_group = get_tensor_model_parallel_group() if group is None else group
        self.linear_router = nn.Linear(hidden_size, num_experts, bias=bias, dtype=dtype, device=device)
        if store_transposed_weights:
            self.weight_T = nn.Parameter(self.linear_router.weight.detach().T.clone())

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden] -> [tokens, experts], in the router's dtype."""
        inputs = hidden_states.to(self.linear_router.weight.dtype)
        if self.jitter_eps and self.training:
            inputs = inputs * torch.empty_like(inputs).uniform_(1.0 - self.jitter_eps, 1.0 + self.jitter_eps)
        return self.linear_router(inputs).view(-1, self.num_experts)

    def apply_activation_fn(self, weights: Tensor) -> Tensor:
        """Affinities, float64: each logit by itself, or over dimension 1.

        Raises:
            ValueError: `act_fn` was set to something else since.
        """
        if self.act_fn == "sigmoid":
            return torch.sigmoid(weights.double())
        if self.act_fn == "softmax":
            return F.softmax(weights, dim=1, dtype=torch.float64)
        raise ValueError("act_fn must be either 'sigmoid' or 'softmax'")

    @abstractmethod
    def forward(self, hidden_states: Tensor) -> Routing:
        """[B, S, hidden] -> logits [T, E], affinities [T, E] in the input's dtype, chosen experts [T, k] int64."""

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Add the transposed weight, where it is kept."""
        if self.store_transposed_weights:
            own = prefix.removesuffix("weight")
            weight = model_state_dict[f"{own}linear_router.weight"]
            model_state_dict[f"{own}weight_T"] = weight.detach().T.clone()


class RouterTopK(RouterBase):
    """The k largest logits. Affinities are over all experts, or, `apply_act_fn_over_topk`, over the chosen ones."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"),  # the stack's own default
        bias: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        act_fn: str = "softmax",
        apply_act_fn_over_topk: bool = False,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
    ) -> None:
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            act_fn,
            sequence_parallel_enabled,
            sequence_dimension,
            dtype,
            device,
            bias,
            tensor_model_parallel_group,
            jitter_eps,
            store_transposed_weights,
            apply_act_fn_over_topk,
        )

    def forward(self, hidden_states: Tensor) -> Routing:
        """See the base."""
        logits = self.get_router_logits(hidden_states)
        if self.apply_act_fn_over_topk:
            chosen, index = torch.topk(logits.double(), self.top_k, dim=1)
            affinities = torch.zeros_like(logits, dtype=torch.float64)
            affinities.scatter_(1, index, self.apply_activation_fn(chosen))
        else:
            affinities = self.apply_activation_fn(logits)
            index = torch.topk(logits, self.top_k).indices
        return logits, affinities.to(hidden_states.dtype), index.detach().long()


class GroupLimitedRouter(RouterBase):
    """Sigmoid scores; the best groups by the sum of their two best experts, then the best experts of those.

    `e_score_correction_bias` [E], which a subclass or the port sets, moves the choice alone. Experts of other groups
    count 0 in the choice, so that one of them is taken where a chosen group's score is negative.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"),  # the stack's own default
        tensor_model_parallel_group: ProcessGroup | None = None,
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            "sigmoid",
            sequence_parallel_enabled,
            sequence_dimension,
            dtype,
            device,
            tensor_model_parallel_group=tensor_model_parallel_group,
            jitter_eps=jitter_eps,
        )
        self.n_group, self.topk_group = n_group, topk_group

    def forward(self, hidden_states: Tensor) -> Routing:
        """See the base. Affinities are the plain scores of all experts."""
        logits = self.get_router_logits(hidden_states)
        scores = self.apply_activation_fn(logits).to(hidden_states.dtype)
        index, scores = self.noaux_tc_top_k(scores)
        return logits, scores, index.detach().long()

    def noaux_tc_top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [T, E] -> (chosen experts [T, k], the same scores)."""
        moved = scores + self.e_score_correction_bias.unsqueeze(0)
        by_group = moved.view(moved.shape[0], self.n_group, -1)
        groups = torch.topk(by_group.topk(2, dim=-1).values.sum(-1), self.topk_group).indices
        kept = torch.zeros(moved.shape[0], self.n_group, dtype=torch.bool, device=moved.device)
        kept.scatter_(1, groups, True)
        masked = by_group.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1)
        return torch.topk(masked, self.top_k).indices, scores
