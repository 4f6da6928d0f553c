"""Where a model runs and in which number format."""

from collections.abc import Mapping

import torch

from kvine.config import check_device, check_dtype
from kvine.errors import ConfigError
from kvine.models.dtypes import automatic_dtype
from kvine.models.matmul import choose_torch_matmul, through_fp32

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STORED_DTYPES: Mapping[str, torch.dtype] = {  # as both checkpoint formats name them
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def choose_device(name: str) -> torch.device:
    """`auto` is cuda where there is one, otherwise cpu; mps only by name. Raises ConfigError for what is not there."""
    check_device(name)
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        return torch.device("cuda" if available["cuda"] else "cpu")
    if not available[name]:
        usable = ", ".join(device for device, is_there in available.items() if is_there)
        raise ConfigError(f"Device {name!r} is not available to torch here. Choose one of auto, {usable}.")
    return torch.device(name)


def choose_dtype(name: str, stored: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype and why, in a sentence. `stored` is the type of most of the checkpoint ("BF16", "Q4_1", ...).

    `auto` is what `automatic_dtype` says: bf16 on CPUs without bf16 instructions too, where one row takes half of
    fp32's time and many rows go through fp32. Raises ConfigError for an unknown name or a dtype that the device lacks.
    """
    check_dtype(name)
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name != "auto":
        if name == "bf16" and not has_bf16:
            raise ConfigError("This GPU has no bf16. Choose dtype auto, fp32 or fp16.")
        return DTYPES[name], f"{name} as asked"
    chosen, why = automatic_dtype(stored, device.type, has_bf16=has_bf16)
    return DTYPES[chosen], why


def product_note(dtype: torch.dtype, device: torch.device, multiplies_exact: bool) -> str:
    """What is to be said of products in `dtype` on `device`, where some are with exact weights; often nothing."""
    if not multiplies_exact or device.type != "cpu" or choose_torch_matmul(dtype) is not through_fp32:
        return ""
    return "this CPU has no fast instructions for it, so exact weights are multiplied with more than a few rows in fp32"
