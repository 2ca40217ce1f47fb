"""`verl.utils.seqlen_balancing`: rows dealt out by their length, and micro-batches of at most so many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quadriga.data.ragged import balance_over_ranks


def calculate_workload(seqlen_list: Sequence[int] | Tensor) -> Tensor:
    """What a row of that length costs: linear layers and attention, in arbitrary units."""
    lengths = torch.as_tensor(seqlen_list).long()
    return 24576 * lengths + lengths.square()


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of `b` that is not below `a`."""
    return ceildiv(a, b) * b


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | Tensor, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Row numbers in `k_partitions` sorted lists of about the same total length, and with `equal_size` of the same number.

    Raises:
        AssertionError: there are fewer rows than partitions, or they do not divide evenly.
    """
    lengths = [int(length) for length in seqlen_list]
    if len(lengths) < k_partitions:
        raise AssertionError(f"{len(lengths)} rows cannot fill {k_partitions} partitions")
    if not equal_size:
        return sorted(map(sorted, _longest_first(lengths, k_partitions)))
    if len(lengths) % k_partitions:
        raise AssertionError(f"{len(lengths)} rows do not divide into {k_partitions} equal partitions")
    order, size = balance_over_ranks(lengths, k_partitions), len(lengths) // k_partitions
    return [sorted(order[i * size : (i + 1) * size]) for i in range(k_partitions)]


karmarkar_karp = get_seqlen_balanced_partitions


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    return get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)


def _longest_first(lengths: list[int], parts: int) -> list[list[int]]:
    """Each row, the longest first, to the part that has the least so far; no part stays empty."""
    heap = [(0, 0, part) for part in range(parts)]
    found: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        total, count, part = heapq.heappop(heap)
        found[part].append(row)
        heapq.heappush(heap, (total + lengths[row], count + 1, part))
    for rows in [rows for rows in found if not rows]:  # only where lengths are 0
        rows.append(max(found, key=len).pop())
    return found


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Totals of the given partitions, beside those of a cut in the order of the rows."""
    size = ceildiv(len(seqlen_list), len(partitions))
    before = [sum(seqlen_list[i : i + size]) for i in range(0, len(seqlen_list), size)]
    after = [sum(seqlen_list[row] for row in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / len(partitions),
    }


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """`batch` (a TensorDict) in pieces of at most about `max_token_len` tokens, and the row numbers of each piece.

    All ranks of `dp_group` get the same number of pieces.

    Raises:
        AssertionError: one row alone has more tokens.
    """
    lengths = batch["attention_mask"].sum(-1).tolist()
    if max_token_len < max(lengths):
        raise AssertionError(f"a micro-batch of {max_token_len} tokens cannot hold a row of {max(lengths)}")
    count = max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1)
    count = min(len(lengths), count)
    if same_micro_num_in_dp and dp_group is not None and torch.distributed.is_initialized():
        most = torch.tensor([count])
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        count = int(most)
    if num_batches_divided_by:
        count = ceildiv(count, num_batches_divided_by) * num_batches_divided_by
    costs = calculate_workload(lengths).tolist() if use_dynamic_bsz_balance else lengths
    rows = get_seqlen_balanced_partitions(costs, count, equal_size=False)
    while max(sum(lengths[i] for i in part) for part in rows) > max_token_len and count < len(lengths):
        count += num_batches_divided_by or 1
        rows = get_seqlen_balanced_partitions(costs, count, equal_size=False)
    return [batch[part] for part in rows], rows


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Where each row number stands in `idx_map`."""
    return torch.as_tensor(idx_map).argsort().tolist()


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """Like `rearrange_micro_batches`, for a DataProto with all its columns."""
    _, rows = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    return [data.select_idxs(part) for part in rows], rows


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """What was computed piece by piece, in the order that the rows had."""
    return data[get_reverse_idx([row for part in batch_idx_list for row in part])]
