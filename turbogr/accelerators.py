"""The accelerator of this machine: whether there is one that works, and which one this thread uses.

A build of torch for CUDA names CUDA as its accelerator on every machine, also where no GPU is; what counts is whether
the driver finds a device. Device types are torch's: "cuda" (also AMD's), "npu", "xpu", "mps".
"""

from __future__ import annotations

import torch

from turbogr.errors import UserError


def available_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has and torch can use, None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def choose_device(name: str, local_rank: int | None = None, setting: str = "train.device") -> torch.device:
    """Return the device that a `setting` names; auto takes the accelerator if there is one.

    Of several ranks on a machine, the one with `local_rank` gets the accelerator of that number. It becomes the
    calling thread's current device.

    Raises:
        UserError: a device that this machine or this build of PyTorch does not have.
    """
    if name == "auto":
        name = (available_accelerator() or torch.device("cpu")).type
    try:
        device = torch.device(name)
        if local_rank is not None and device.type != "cpu" and device.index is None:
            device = torch.device(device.type, local_rank)
        make_current(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{setting} '{name}' cannot be used here: {reason}; use auto or cpu") from error
    return device


def make_current(device: torch.device) -> None:
    """Make an accelerator that has a number the current one of this thread; libraries use the current device.

    Every thread begins with device 0 as its current one.
    """
    if device.type not in ("cpu", "meta") and device.index is not None:
        torch.accelerator.set_device_index(device.index)
