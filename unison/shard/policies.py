"""In which dtype a unit computes and sums, and what of it lives in the host's memory."""

from dataclasses import dataclass
from typing import Any

import torch

from unison.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtypes a unit computes, sums gradients and returns.

    The shards, and with them the optimizer's state, keep the dtype the parameters had.

    Attributes:
        param: What parameters are cast to when they are gathered; None keeps their own dtype.
        reduce: In which dtype gradients are summed over granules and ranks. None takes the shards'
            own dtype, and float32 where that is a shorter one.
        output: What the unit's floating-point outputs are cast to; None leaves them.
        buffers: What floating-point buffers are cast to, once; None keeps their own dtype.
        cast_inputs: Whether floating-point inputs are cast to `param`.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output", "buffers"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise BadInput(
                    f"{name} of MixedPrecision must be a floating dtype, found {dtype!r}"
                )

    @property
    def casts(self) -> bool:
        """Whether a pass has anything to cast."""
        return self.param is not None or self.output is not None

    def param_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that parameters whose shards have `dtype` compute in."""
        return self.param if self.param is not None and dtype.is_floating_point else dtype

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradients of such parameters are summed.

        >>> MixedPrecision().reduce_dtype(torch.bfloat16)
        torch.float32
        """
        if self.reduce is not None:
            return self.reduce
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


@dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """What of a unit lives in the host's memory. The optimizer steps where the shards are.

    Attributes:
        parameters: Whether nothing of the shards stays on the device: each gather copies from the
            host. False keeps a copy in the computing dtype on the device, renewed once per step.
        gradients: Whether summed gradients move to the host while the backward pass goes on.
            False moves them at its end, all together.
        pin_memory: Whether the host's buffers are page-locked, so that copies run beside the
            computation (with CUDA only).
    """

    parameters: bool = True
    gradients: bool = True
    pin_memory: bool = True


def as_precision(policy: Any) -> MixedPrecision:
    """Accept None, our own policy, or the one of torch's FSDP2.

    Raises:
        BadInput: If it is something else.
    """
    if policy is None:
        return MixedPrecision()
    if isinstance(policy, MixedPrecision):
        return policy
    if type(policy).__name__ == "MixedPrecisionPolicy":  # torch.distributed.fsdp's, not imported
        return MixedPrecision(
            param=policy.param_dtype,
            # FSDP2 sums in the computing dtype unless told otherwise; its users rely on that.
            reduce=policy.reduce_dtype or policy.param_dtype,
            output=policy.output_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )
    raise BadInput(
        "mp_policy must be a unison.MixedPrecision or torch.distributed.fsdp.MixedPrecisionPolicy, "
        f"found {policy!r}"
    )


def as_offload(policy: Any) -> CPUOffload | None:
    """Accept None, our own policy, or one of torch's FSDP2.

    Raises:
        BadInput: If it is something else.
    """
    if policy is None or isinstance(policy, CPUOffload):
        return policy
    if type(policy).__name__ == "CPUOffloadPolicy":
        return CPUOffload(pin_memory=policy.pin_memory)
    if type(policy).__name__ == "OffloadPolicy":  # FSDP2's word for none
        return None
    raise BadInput(
        "offload_policy must be a unison.CPUOffload or torch.distributed.fsdp.CPUOffloadPolicy, "
        f"found {policy!r}"
    )
