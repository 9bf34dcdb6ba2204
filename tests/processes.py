"""Processes of a test that talk through gloo: tasks that run in all of them, started once."""

from __future__ import annotations

import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Task = Callable[[str], None]  # takes the device

SECONDS = 240  # for all tasks, most of them to import torch on a busy machine

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no gloo"
)


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Of one shape, by rank."""
    copies = [torch.empty_like(tensor.cpu()) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.detach().cpu().contiguous())
    return copies


def assert_same_bits(tensor: torch.Tensor) -> None:
    first, *others = everywhere(tensor)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)


def _process(rank: int, size: int, tasks: tuple[Task, ...], device: str, folder: str) -> None:
    """Runs the tasks until one fails, and leaves a file for each: empty, or with the traceback."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    # They meet in a file: a port that is free now may be taken when they open it.
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size
    )
    for task in tasks:
        report = Path(folder, f"{task.__name__}-{rank}")
        torch.manual_seed(0)
        try:
            task(device)
        except BaseException:  # pytest's own failures among them
            report.write_text(f"rank {rank}: {traceback.format_exc()}")
            raise
        report.write_text("")
    dist.destroy_process_group()


@functools.cache
def reports(tasks: tuple[Task, ...], size: int, device: str) -> dict[str, str]:
    """What each task's processes said. One start for all: importing torch takes longer."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_process, (size, tasks, device, folder), nprocs=size, join=False)
        end = time.monotonic() + SECONDS
        stopped = f"not done after {SECONDS} s"
        try:
            while time.monotonic() < end:
                if context.join(timeout=1):
                    break
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            stopped = f"another task failed, or the processes did not start:\n{error}"
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        found = {}
        for task in tasks:
            files = [Path(folder, f"{task.__name__}-{rank}") for rank in range(size)]
            texts = [file.read_text() for file in files if file.exists()]
            found[task.__name__] = "\n".join(filter(None, texts)) or (
                "" if len(texts) == size else stopped
            )
        return found
