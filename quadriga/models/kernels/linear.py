"""x · Wᵀ + b with bits that depend on nothing but the row of x and the weights.

A library picks a kernel by the shape of the whole product, and kernels add in different orders. Here every element is one
sum over K in ascending steps of the matrix instruction, whatever the number of rows and the size of the tile that it is in:
so a row gives the same bits alone, in a batch of any size, in generation and in training. Tiles are chosen by speed only.

The gradients are products of cuBLAS: for equal inputs they are equal from run to run, and nothing else is asked of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How a product is cut up. All choices give the same bits."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    bulk: bool = False
    """Operands come by the bulk copy engine, and each program computes one tile after the other"""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x[..., K]` times `weight[N, K]` transposed, plus `bias[N]`; in x's dtype. Differentiable."""
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        rows = x.reshape(-1, x.shape[-1])
        return product(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        want_x, want_weight, want_bias = ctx.needs_input_grad
        grad_x = (grad @ weight).view(x.shape) if want_x else None
        grad_weight = grad.t() @ x.reshape(-1, x.shape[-1]) if want_weight else None
        grad_bias = grad.sum(0) if want_bias and ctx.has_bias else None
        return grad_x, grad_weight, grad_bias


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """`x[M, K] @ weight[N, K].T + bias[N]`, summed in float32 and rounded once to `out`'s dtype (default: x's)."""
    rows, depth = x.shape
    columns = weight.shape[0]
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if tiles is None:
        tiles = _tiles(rows, columns, x.element_size())
    count = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
    if tiles.bulk and all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (x, weight)):
        programs = min(count, _processors(x.device))
        _bulk_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
            TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.depth]),
            weight if bias is None else bias,
            out,
            rows,
            columns,
            depth,
            out.stride(0),
            WITH_BIAS=bias is not None,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            DEPTH=tiles.depth,
            PROGRAMS=programs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out
    _product_kernel[(count,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        columns,
        depth,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        WITH_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EVEN_DEPTH=depth % tiles.depth == 0,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiles(rows: int, columns: int, item_size: int) -> Tiles:
    """The fastest of those that were measured on an H200."""
    if item_size == 4:
        return Tiles(32, 32, 32, 4, 2)
    if rows <= 16:
        return Tiles(16, 64, 128, 2, 4)
    if rows <= 64:
        return Tiles(64, 64, 64, 4, 6) if columns >= 4096 else Tiles(64, 32, 128, 4, 4)
    if columns <= 4096 and rows <= 512:
        return Tiles(64, 64, 64, 4, 6)
    if columns <= 1024 and rows <= 2048:
        return Tiles(64, 128, 64, 4, 4, bulk=True)
    return Tiles(128, 128, 64, 8, 4, bulk=True)


@triton.jit
def _place(number, row_tiles, column_tiles):
    """Row and column of a tile: neighbours share operands, eight tiles of rows, then the next columns."""
    band = number // (8 * column_tiles)
    band_rows = tl.minimum(row_tiles - band * 8, 8)
    inside = number % (8 * column_tiles)
    return band * 8 + inside % band_rows, inside // band_rows


@triton.jit
def _store(out, total, bias, row, column, rows, columns, out_row, WITH_BIAS: tl.constexpr):
    if WITH_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit(do_not_specialize=["rows"])  # one kernel for every batch
def _bulk_kernel(x, weight, bias, out, rows, columns, depth, out_row, WITH_BIAS: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = _place(number, row_tiles, column_tiles)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, depth, DEPTH):
            left, right = x.load([row_tile * ROWS, start]), weight.load([column_tile * COLUMNS, start])
            total = tl.dot(left, right.T, total)
        row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
        _store(out, total, bias, row, column, rows, columns, out_row, WITH_BIAS)


@triton.jit(do_not_specialize=["rows"])  # one kernel for every batch
def _product_kernel(x, weight, bias, out, rows, columns, depth, x_row, weight_row, out_row,
                    WITH_BIAS: tl.constexpr, PRECISION: tl.constexpr, EVEN_DEPTH: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    row_tile, column_tile = _place(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS))
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    # Rows beyond the end read the last one again: no mask in the loop, and they are not stored.
    from_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_row + step[None, :]
    from_weight = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * weight_row + step[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        if EVEN_DEPTH:
            left, right = tl.load(from_x + start), tl.load(from_weight + start)
        else:
            valid = (start + step < depth)[None, :]
            left = tl.load(from_x + start, mask=valid, other=0.0)
            right = tl.load(from_weight + start, mask=valid, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    _store(out, total, bias, row, column, rows, columns, out_row, WITH_BIAS)
