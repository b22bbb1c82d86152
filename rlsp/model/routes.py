"""Which operator each module belongs to, and whether it is of the route that the operator declares."""

from __future__ import annotations

from torch import nn

from rlsp.model.wiring import NATIVE, STRICT, Operator, Wiring

_OPERATORS = {
    **dict.fromkeys(
        ("input_layernorm", "linear_qkv", "q_layernorm", "k_layernorm", "core_attention", "linear_proj"),
        Operator.ATTENTION,
    ),
    **dict.fromkeys(("pre_mlp_layernorm", "linear_fc1", "activation_func", "linear_fc2"), Operator.FFN),
    **dict.fromkeys(("word_embeddings", "final_layernorm", "output_layer"), Operator.LOGP),
}
"""By the last part of a module's name: an operator's norm goes with it."""


def require_routes(gpt: nn.Module, wiring: Wiring) -> None:
    """Refuse a model of which a module is not of the route that its operator declares on this side.

    Raises:
        ValueError: Every such module is named.
    """
    wrong = []
    for name, module in gpt.named_modules():
        operator = _OPERATORS.get(name.rpartition(".")[2])
        declared = None if operator is None else NATIVE if wiring.native(operator) else STRICT
        if (made := getattr(module, "route", None)) != declared:
            wrong.append(f"{name} is {made}, declared is {declared}")
    if wrong:
        raise ValueError(f"routes: {'; '.join(wrong)}")
