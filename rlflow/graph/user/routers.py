"""What a user says about the routers of a mixture of experts: losses and a correction of their own.

Nothing is computed here; the engines do it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlflow.graph.strict_model import Strict


class Router(Strict):
    """How the routers of a mixture of experts are kept in balance while the model is trained.

    `balance_coef` times the load-balancing loss of Fedus et al., "Switch Transformer"
    (arXiv:2101.03961, equations 4 to 6) and `z_coef` times the router z-loss of Zoph et al.,
    "ST-MoE" (arXiv:2202.08906, equation 5) are added to the loss of every update of the model. Both
    are means over layers, of all tokens of a row that the model reads, prompt and response, over
    the rows of the whole optimizer step on all ranks (Qiu et al., arXiv:2501.11873): no cut into
    micro-batches changes them. k experts a token make a balanced loss of k, as in transformers,
    whose `load_balancing_loss_func` takes all layers as one: `balance_over="model"`.

    With a `bias_rate` there is no loss but a bias of each expert, which its router adds before it
    chooses: after a step it rises by the rate where fewer tokens than the mean chose the expert,
    and falls where more did (Wang et al., arXiv:2408.15664, algorithm 1; DeepSeek-V3 takes 0.001).
    It is a weight like others: in checkpoints, and sent to rollouts. E535 for a family without.

    An update with routers logs `expert_imbalance`, the largest number of tokens of an expert over
    the mean of its layer, as a mean over layers, and `expert_imbalance_max` of the worst layer;
    `balance_loss` and `z_loss`, before their coefficients. No token is dropped.
    """

    balance_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    balance_over: Literal["layer", "model"] = "layer"
    z_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    bias_rate: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def model_post_init(self, context: object, /) -> None:
        """Refuse an option that nothing reads."""
        if self.balance_over == "model" and not self.balance_coef:
            raise ValueError("balance_over does nothing without balance_coef=")

    def describe(self) -> str:
        """The printed form: what differs from the defaults."""
        said = self.model_dump(exclude_defaults=True)
        return f"router({', '.join(f'{key}={value}' for key, value in said.items())})"
