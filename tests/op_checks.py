"""What every op test uses: the error measure against float64, and the two storage types."""

import torch

DTYPES = [torch.float32, torch.bfloat16]


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """``|out - exact| / |exact|`` over all elements, in float64; NaN stays NaN and so never passes."""
    exact = exact.double()
    return float((out.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def assert_as_exact_as_torch(out: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> None:
    """The kernel's error against float64 is at most ``factor`` times the plain-torch twin's in the same dtype."""
    assert out.dtype == twin.dtype
    assert out.shape == twin.shape
    floor = torch.finfo(out.dtype).eps / 8
    ours, theirs = relative_error(out, exact), relative_error(twin, exact)
    assert ours <= factor * max(theirs, floor), f"error {ours:.2e}, plain torch {theirs:.2e}"
