"""A call's arrays on a GPU, lying there as they lie in main memory, with NaN around them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array

AROUND = 1024  # bytes before and after an array; all of them 0xff, which is NaN in every float type


def placed(x: Array, device: str) -> Any:
    """The array there, or as it is on "cpu"."""
    return x if device == "cpu" else _placed(x, device)


def _placed(x: Array, device: str) -> Any:
    """With the same steps and the same address modulo 16; PyTorch has no steps that are negative or odd."""
    import torch

    x = np.asarray(x)  # of no dimensions, it may come as a number
    aside = x.ctypes.data % 16
    if x.size == 0 or aside % x.itemsize or any(step < 0 or step % x.itemsize for step in x.strides):
        return arrays.as_tensor(np.array(x, order="C")).to(device)
    span = x.itemsize + sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True))
    held = np.full(span + 2 * AROUND, 0xFF, np.uint8)
    first = AROUND + aside
    held[first : first + span] = np.frombuffer((ctypes.c_uint8 * span).from_address(x.ctypes.data), np.uint8)
    typed = torch.from_numpy(held).to(device)[first : first + span].view(_type(x))
    return typed.as_strided(x.shape, [step // x.itemsize for step in x.strides])


def _type(x: Array) -> Any:
    return arrays.as_tensor(np.empty(0, x.dtype)).dtype


def soil(shape: tuple[int, ...], dtype: str, device: str) -> None:
    """What is allocated on the device next is NaN until it is written."""
    import torch

    torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=device)
