"""DataProto between processes: through Ray's object store, as a future, and over a process group."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture, all_gather_data_proto


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False
        )
    yield
    if started_here:
        ray.shutdown()


def big_batch() -> DataProto:
    """Large enough (8 MB a column) to live in the shared object store."""
    return DataProto.from_dict(
        {"x": torch.ones(1000, 2000), "half": torch.ones(1000, 4000, dtype=torch.bfloat16)},
        {"n": np.ones((1000, 1000)), "uid": [str(i) for i in range(1000)]},
        {"step": 1},
    )


@ray.remote(num_cpus=1)
class Worker:
    def add_one_in_place(self, data: DataProto) -> DataProto:
        warnings.simplefilter("error")
        data.batch["x"] += 1
        data.batch["half"].fill_(7)
        data.non_tensor_batch["n"][:] = 5
        return data

    def sums(self, data: DataProto) -> tuple[float, float, float]:
        return float(data.batch["x"].sum()), float(data.batch["half"].sum()), float(data.non_tensor_batch["n"].sum())

    def echo(self, data: DataProto) -> DataProto:
        return data

    def resolve(self, future: DataProtoFuture) -> int:
        return len(future.get(timeout_s=30))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self) -> None:
        raise ValueError("the worker's own words")


@pytest.fixture(scope="module")
def workers() -> list:
    return [Worker.remote(), Worker.remote()]


def test_in_place_writes_of_a_receiver_stay_its_own(workers: list) -> None:
    stored = ray.put(big_batch())
    before = ray.get(workers[1].sums.remote(stored))
    changed = ray.get(workers[0].add_one_in_place.remote(stored))
    assert changed.batch["x"][0, 0] == 2
    assert changed.batch["half"][0, 0] == 7
    assert ray.get(workers[1].sums.remote(stored)) == before
    assert ray.get(stored) == big_batch()


def test_driver_may_write_to_what_it_receives(workers: list, recwarn) -> None:
    received = ray.get(workers[0].echo.remote(big_batch()))
    received.batch["x"].zero_()
    received.non_tensor_batch["n"] += 1
    assert not [warning for warning in recwarn.list if "writable" in str(warning.message)]


@pytest.mark.parametrize(
    "data",
    [
        DataProto(),
        DataProto.from_dict({"e": torch.zeros(0, 3)}, {"o": []}),
        DataProto.from_dict(non_tensors={"o": [{"a": (1, 2)}, None]}, meta_info={"f": float("nan")}),
        DataProto.from_dict({"f8": torch.zeros(2).to(torch.float8_e4m3fn)}, {"u": np.array(["é", ""])}),
        DataProto.from_dict({"j": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}),
        DataProto.from_dict({"s": torch.eye(2).to_sparse()}),
    ],
    ids=["nothing", "no rows", "no tensors", "float8", "ragged", "sparse"],
)
def test_every_kind_of_table_comes_through(workers: list, data: DataProto) -> None:
    assert ray.get(workers[0].echo.remote(data)) == data


def test_own_classes_come_through_inside_the_cluster(workers: list) -> None:
    class Custom:  # local, so that Ray sends its definition along
        value = 3

    data = DataProto.from_dict(non_tensors={"o": [Custom()]}, meta_info={"c": Custom()})
    received = ray.get(workers[0].echo.remote(data))
    assert received.non_tensor_batch["o"][0].value == 3
    assert received.meta_info["c"].value == 3


def test_columns_stay_out_of_the_pickle() -> None:
    buffers: list = []
    frame = pickle.dumps(big_batch(), protocol=5, buffer_callback=buffers.append)
    assert len(frame) < 20_000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 24_000_000
    read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    loaded = pickle.loads(frame, buffers=read_only)
    assert loaded == big_batch()
    loaded.batch["x"].zero_()
    assert pickle.loads(frame, buffers=read_only) == big_batch()


def test_future_collects_chunks_and_passes_through_other_workers(workers: list) -> None:
    parts = big_batch().chunk(2)
    future = DataProtoFuture.concat([w.echo.remote(p) for w, p in zip(workers, parts, strict=True)])
    assert future.get() == big_batch()
    halves = future.chunk(2)
    assert halves[1].get(timeout_s=30) == parts[1]
    assert halves[1].chunk(4)[3].get() == parts[1].chunk(4)[3]
    assert ray.get(workers[0].resolve.remote(halves[0])) == 500


def test_future_applies_collect_then_dispatch(workers: list) -> None:
    refs = [w.sums.remote(big_batch()) for w in workers]
    assert DataProtoFuture(collect_fn=len, futures=refs, dispatch_fn=lambda n: n * 10).get() == 20


def test_future_gives_up_at_its_deadline_and_names_what_is_missing(workers: list) -> None:
    refs = [ray.put(1), workers[0].sleep.remote(2)]
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"1 of 2 worker results were not ready after 0\.3 s"):
        DataProtoFuture(collect_fn=list, futures=refs).get(timeout_s=0.3)
    with pytest.raises(WorkerError):
        DataProtoFuture(collect_fn=list, futures=refs, timeout_s=0.1).chunk(2)[0].get()
    assert time.monotonic() - started < 1.5


def test_a_workers_exception_surfaces_through_the_future(workers: list) -> None:
    with pytest.raises(ValueError, match="the worker's own words"):
        DataProtoFuture(collect_fn=list, futures=[workers[1].fail.remote()]).get()


def rows_of_rank(rank: int) -> DataProto:
    """Rank 0 has one row, rank 1 has three."""
    rows = 1 + 2 * rank
    return DataProto.from_dict(
        {"half": torch.full((rows, 2), float(rank)).bfloat16(), "mask": torch.ones(rows, 1, dtype=torch.bool)},
        {"label": [f"{rank}{row}" for row in range(rows)]},
        {"rank": rank},
    )


def gather(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    data = rows_of_rank(rank)
    all_gather_data_proto(data, dist.group.WORLD)
    data.save_to_disk(f"{folder}/{rank}.dp")
    dist.destroy_process_group()


def test_all_gather_gives_every_rank_all_rows_in_rank_order(tmp_path: Path) -> None:
    mp.spawn(gather, args=(str(tmp_path),), nprocs=2)
    both = [rows_of_rank(rank).select(meta_info_keys=[]) for rank in range(2)]
    for rank in range(2):
        gathered = DataProto.load_from_disk(tmp_path / f"{rank}.dp")
        assert gathered.meta_info == {"rank": rank}
        assert gathered.select(meta_info_keys=[]) == DataProto.concat(both)
