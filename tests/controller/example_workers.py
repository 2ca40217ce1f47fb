"""Workers used by several tests. Light: constructing one does not import torch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from quadriga.controller import Dispatch, Execute, Worker, make_nd_compute_dataproto_dispatch_fn, register


class Plain(Worker):
    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset

    @register(Dispatch.ONE_TO_ALL)
    def whoami(self):
        return self.rank, self.world_size, self.offset

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, *names):
        return {name: os.environ.get(name) for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def modules(self):
        return [m for m in ("torch", "transformers") if m in sys.modules]

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value, *, times=1):
        return value * times

    @register(Dispatch.ONE_TO_ALL)
    async def echo_async(self, value):
        await asyncio.sleep(0.01)
        return value

    @register(Dispatch.ALL_TO_ALL)
    def own(self, value):
        return value

    @register(Dispatch.DP_COMPUTE)
    def add(self, a, b):
        return a + b + self.offset

    @register(Dispatch.RANK_ZERO)
    def first(self, value):
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_of_all(self, value):
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, value, delay_s=0.0):
        time.sleep(delay_s)
        return value

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, rank):
        if self.rank == rank:
            raise KeyError("no such thing")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def raise_while_others_hang(self):
        if self.rank == 0:
            raise ValueError("rank zero gave up")
        time.sleep(60)

    @register(Dispatch.ONE_TO_ALL)
    def kill_self(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_for_ever(self):
        time.sleep(3600)

    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self):
        import torch

        self.init_process_group(30)
        ranks = torch.tensor([self.rank])
        torch.distributed.all_reduce(ranks)
        return int(ranks), torch.distributed.get_backend()


class Rows(Worker):
    """Works on rows of a DataProto."""

    def __init__(self, tensor_parallel: int = 1) -> None:
        super().__init__()
        self.register_dispatch_info("mesh", self.rank // tensor_parallel, self.rank % tensor_parallel == 0)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, data):
        data.batch["x"] = data.batch["x"] * 2
        data.non_tensor_batch["rank"] = data.non_tensor_batch["name"].copy()
        data.non_tensor_batch["rank"][:] = self.rank
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, data):
        data.batch["x"] = data.batch["x"] * 2
        return data

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, data):
        return function(data)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data):
        return len(data)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def fail(self, data):
        raise RuntimeError(f"{len(data)} rows are too many")

    @register(make_nd_compute_dataproto_dispatch_fn("mesh"))
    def on_mesh(self, data):
        data.non_tensor_batch["rank"] = data.non_tensor_batch["name"].copy()
        data.non_tensor_batch["rank"][:] = self.rank
        return data

    @register(make_nd_compute_dataproto_dispatch_fn("unknown"))
    def on_unknown_mesh(self, data):
        return data


class CannotStart(Worker):
    def __init__(self) -> None:
        super().__init__()
        if self.rank == 1:
            raise OSError("the weights are not where they should be")

    @register(Dispatch.ONE_TO_ALL)
    def hello(self):
        return "hello"


class SlowStart(CannotStart):
    def __init__(self) -> None:
        time.sleep(3600)
