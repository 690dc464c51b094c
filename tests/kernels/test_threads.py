"""The kernel thread pool: every task runs exactly once, whatever the threads do."""

import threading
from typing import Any

import numpy as np
import torch

from tokenmill.kernels.cpu.threads import launch, set_num_threads, task_kernel
from tokenmill.kernels.cpu.tiles import i64_at


def _count_body(args: Any, task: int) -> None:
    from_args = i64_at(args[0])
    from_args[task] += args[1]


_count = task_kernel(_count_body)


def test_each_task_runs_once_over_many_launches() -> None:
    set_num_threads(4)
    for num_tasks in (1, 2, 3, 64, 1000):
        hits = torch.zeros(num_tasks, dtype=torch.int64)
        for _ in range(300):
            launch(_count, num_tasks, hits.data_ptr(), 1)
        assert hits.tolist() == [300] * num_tasks


def test_launches_from_several_threads_do_not_mix() -> None:
    set_num_threads(3)
    buffers = [torch.zeros(50, dtype=torch.int64) for _ in range(4)]

    def work(buffer: torch.Tensor, value: int) -> None:
        for _ in range(200):
            launch(_count, 50, buffer.data_ptr(), value)

    threads = [
        threading.Thread(target=work, args=(buffer, value)) for value, buffer in enumerate(buffers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value, buffer in enumerate(buffers):
        assert np.array_equal(buffer.numpy(), np.full(50, 200 * value))
