"""How many bytes the training state of a model takes, from the number of its parameters. Pure.

Counted is what grows with the parameters: the weights, and what the optimizer keeps for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import InvalidRequestError

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number, by the name of its type."""

OPTIMIZER_VALUES = {"adamw": 2, "adam": 2, "lion": 1, "muon": 1, "momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter, by its name."""

PARAMS_COUNT_MAX = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A model's weights and its optimizer's state.

    ``optimizer_dtype`` is the type of what the optimizer keeps, empty: that of the weights, as
    torch's own optimizers have it. ``master``: there is a copy of the weights in fp32 besides.

    Raises:
        InvalidRequestError: a number or a name that is none of those above; it is named.
    """

    params_count: int
    dtype: str = "fp32"
    optimizer: str = "adamw"
    optimizer_dtype: str = ""
    master: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.params_count <= PARAMS_COUNT_MAX:
            raise InvalidRequestError(
                f"{self.params_count} parameters must be 1 to {PARAMS_COUNT_MAX:.0e}"
            )
        for name, known in (
            (self.dtype, VALUE_BYTES),
            (self.optimizer_dtype or self.dtype, VALUE_BYTES),
            (self.optimizer, OPTIMIZER_VALUES),
        ):
            if name not in known:
                raise InvalidRequestError(f"{name!r} is none of {', '.join(known)}")

    @property
    def total_bytes(self) -> int:
        """The state of the whole model, on all ranks together."""
        each = VALUE_BYTES[self.dtype] + OPTIMIZER_VALUES[self.optimizer] * self._kept_bytes
        return self.params_count * (each + (VALUE_BYTES["fp32"] if self.master else 0))

    @property
    def _kept_bytes(self) -> int:
        return VALUE_BYTES[self.optimizer_dtype or self.dtype]

    def __str__(self) -> str:
        parts = [f"{VALUE_BYTES[self.dtype]} B of {self.dtype} weights"]
        if self.master:
            parts.append(f"{VALUE_BYTES['fp32']} B of fp32 weights")
        if values := OPTIMIZER_VALUES[self.optimizer]:
            parts.append(f"{values} x {self._kept_bytes} B of {self.optimizer}")
        return f"{self.params_count:,} parameters x ({' + '.join(parts)})"
