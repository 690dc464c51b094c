"""Opens the tiers that `--kv-offloading` asks for around an engine's cache."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path

import torch

import tokenmill
from tokenmill.core.config import Setup
from tokenmill.core.kv import DISK, HOST, parse_tiers
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.memory import available_bytes
from tokenmill.engine.ranks.shared_kv import GroupCalls
from tokenmill.engine.ranks.shared_tiers import GroupCopies
from tokenmill.kernels import cpu_kernels
from tokenmill.kv.connectors import geometry
from tokenmill.kv.tiers.disk_tier import DiskTier
from tokenmill.kv.tiers.offloading import KVTiers
from tokenmill.kv.tiers.page_copies import PageCopies, open_copies, page_bytes, tensors_of
from tokenmill.sched.scheduler import Scheduler

_STAGED_SLOTS = 64  # blocks in host memory on their way to disk, where that is the only tier
_IMAGES = ("preprocessor_config.json",)  # what becomes of images before the model sees them
_PACKAGE = Path(tokenmill.__file__).parent
_COMPUTE = ("kernels", "layers", "models")  # packages by which keys and values are computed
_COPIED_BYTES = 2**26  # of a copy that is timed
_READ_BYTES = 2**24  # of a file
_ROUNDS = 2  # the first one may wait for what it uses to be set up
_WAIT_S = 20e-6
_log = logging.getLogger(__name__)


def check_tiers(asked: Setup) -> None:
    """Refuse flags that leave --kv-offloading without a use."""
    if asked.cache.offloading is None:
        return
    problem = None
    if not asked.cache.prefix_cache:
        problem = "the prefix cache: leave out --no-prefix-cache"
    elif not asked.scheduler.chunked_prefill:
        problem = "chunked prefill"
    if problem:
        raise ModelLoadError(f"--kv-offloading {asked.cache.offloading} needs {problem}")


def open_tiers(
    setup: Setup,
    scheduler: Scheduler,
    kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
    spec: ModelSpec,
    weights: str,
    calls: GroupCalls | None = None,
) -> KVTiers | None:
    """Tiers behind an engine's cache, if any are asked for; `weights` is their digest.

    Ranks that share requests are told by `calls`.
    """
    if setup.cache.offloading is None:
        return None
    sizes = parse_tiers(setup.cache.offloading)
    host_bytes = sizes.host_bytes // setup.parallel.num_ranks  # of this rank
    tensors = tensors_of(kv_cache)
    num_slots = _num_slots(host_bytes, page_bytes(tensors), scheduler)
    block_size, root = scheduler.pool.block_size, _root(setup, spec, weights, tensors)
    assert setup.cache.block_size == block_size
    disk = None
    if sizes.folder is not None:
        disk = DiskTier(sizes.folder, sizes.disk_bytes, root)
    copies, on_disk = open_copies(tensors, num_slots), None
    if calls is not None:
        copies = shared = GroupCopies(copies, calls, root)
        on_disk = shared.on_disk
    tiers = KVTiers(scheduler, copies, disk, root, on_disk)
    num_pages, token_bytes = scheduler.pool.num_blocks, page_bytes(tensors) / block_size
    tiers.token_ms = measure_token_ms(tiers.copies, disk, num_pages, token_bytes)
    return tiers


def _num_slots(host_bytes: int, size: int, scheduler: Scheduler) -> int:
    pool, free = scheduler.pool, available_bytes()
    if host_bytes > free:
        raise ModelLoadError(
            f"--kv-offloading host={host_bytes / 2**30:.1f}GiB: only {free / 2**30:.1f} GiB of "
            "memory are free beside the model and its KV cache"
        )
    least = size * pool.sliding.pages_per_block
    if host_bytes and host_bytes < least:
        raise ModelLoadError(
            f"--kv-offloading host={host_bytes}: one block of {pool.block_size} tokens takes "
            f"{least} bytes; give it more"
        )
    return host_bytes // size if host_bytes else _STAGED_SLOTS * pool.sliding.pages_per_block


def _root(setup: Setup, spec: ModelSpec, weights: str, tensors: list[torch.Tensor]) -> bytes:
    """A digest of all that the bytes of a block depend on, but for tokens, images and salt."""
    model, execution, device = setup.model, setup.execution, tensors[0].device
    machine = platform.machine()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    facts = (
        geometry(spec, weights, tensors, setup.cache.dtype, setup.cache.block_size or 0),
        spec,
        _content([Path(model.model, name) for name in _IMAGES]),
        _content(file for name in _COMPUTE for file in sorted(_PACKAGE.glob(f"{name}/**/*.py"))),
        (model.dtype, execution.mtp > 0),
        (execution.fused_kernels, execution.batch_invariant, cpu_kernels()),
        (machine, torch.__version__),
    )
    return blake2b(repr(facts).encode(), digest_size=16).digest()


def _content(files: Iterable[Path]) -> str:
    digest = blake2b(digest_size=16)
    for file in files:
        if file.is_file():
            data = file.read_bytes()
            digest.update(b"%s %d\n%s" % (file.name.encode(), len(data), data))
    return digest.hexdigest()


def measure_token_ms(
    copies: PageCopies, disk: DiskTier | None, num_pages: int, token_bytes: float
) -> dict[str, float]:
    """Milliseconds by tier in which a token of so many bytes comes back to an idle device.

    The device must have `num_pages` that nobody uses; their contents stay.
    """
    rates = {HOST: max(_host_rate(copies, num_pages) for _ in range(_ROUNDS))}
    if disk is not None and (disk_rate := disk.measure_rate(_READ_BYTES)) is not None:
        rates[DISK] = disk_rate
    for tier, rate in rates.items():
        _log.info("KV comes back from %s at %.2f GB/s", tier, rate / 1e9)
    return token_ms(rates, token_bytes)


def token_ms(rates: dict[str, float], token_bytes: float) -> dict[str, float]:
    """Milliseconds of a token at rates in bytes per second; what is on disk goes by the host."""
    host_ms = 1e3 * token_bytes / rates[HOST]
    found = {HOST: host_ms}
    if DISK in rates:
        found[DISK] = host_ms + 1e3 * token_bytes / rates[DISK]
    return found


def _host_rate(copies: PageCopies, num_pages: int) -> float:
    size = int(copies.host.shape[1])
    pages = list(range(max(1, min(num_pages, len(copies.host), _COPIED_BYTES // size))))
    copies.save(pages, pages)
    copies.settle()
    return len(pages) * size / _seconds(lambda: _load(copies, pages))


def _load(copies: PageCopies, pages: list[int]) -> None:
    read = copies.load(pages, pages)
    while not read.done():
        time.sleep(_WAIT_S)


def _seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)
