"""Quick launches reach the launcher with what Triton's own would hand it."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import cache  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tokenmill.kernels import prepare_triton  # noqa: E402
from tokenmill.kernels.gpu import launch  # noqa: E402
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick  # noqa: E402

Launch = tuple[Any, ...]


def add_kernel(x, out, count, by, BLOCK: tl.constexpr, TWICE: tl.constexpr = False):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < count) + by
    tl.store(out + index, 2 * value if TWICE else value, mask=index < count)


def wrong_kernel(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, BLOCK), no_such_name)  # noqa: F821


class Device:
    """A Hopper GPU that compiles for itself and writes down what it is asked to launch."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.num_loaded = 0
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda _: {"max_shared_mem": 2**17}
        )

    def _load(self, *_: object) -> Launch:
        self.num_loaded += 1
        return "module", f"function {self.num_loaded}", 0, 0, 1024

    def launcher_cls(self, *_: object) -> Any:
        return lambda *launch: self.launches.append(launch)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(driver, "_active", device)
    return device


X = torch.zeros(65)
CALLS: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = [
    ((3,), (X, X, 33, 2), {"BLOCK": 16}),
    ((3,), (X, X, 35, 2), {"BLOCK": 16}),  # another number of the same form
    ((2, 5), (X, X, 32, 2), {"BLOCK": 16}),  # divisible by 16
    ((3,), (X, X, 1, 2), {"BLOCK": 16}),
    ((3,), (X[1:], X, 33, 2), {"BLOCK": 16}),  # not aligned
    ((3,), (X.half(), X, 33, 2.5), {"BLOCK": 16}),
    ((3,), (X, X, 33, 2), {"BLOCK": 16, "TWICE": True}),
    ((3,), (X, X, 33, 2), {"BLOCK": 16, "num_warps": 2}),
]


def test_later_launches_are_those_of_triton(device: Device) -> None:
    plain, own = JITFunction(add_kernel), quick(JITFunction(add_kernel))
    for grid, args, constants in CALLS:
        for _ in range(2):
            plain[grid](*args, **constants)
    expected, device.launches, loaded = device.launches, [], device.num_loaded
    device.num_loaded = 0
    for grid, args, constants in CALLS:
        for _ in range(2):
            own[grid](*args, **constants)
    assert device.num_loaded == loaded == 7  # forms
    assert len(expected) == len(device.launches) == 16
    for theirs, ours in zip(expected, device.launches, strict=True):
        # Between the metadata and the kernel's arguments are the hooks, of which there are none.
        assert theirs[:6] == ours[:6]
        assert all(a is b or a == b for a, b in zip(theirs[9:], ours[9:], strict=True))


def test_a_hook_is_called(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    own = quick(JITFunction(add_kernel))
    own[(1,)](X, X, 33, 2, BLOCK=16)
    own[(1,)](X, X, 33, 2, BLOCK=16)
    assert device.launches[-1][7] is None
    hook = SimpleNamespace(calls=[print])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    own[(1,)](X, X, 33, 2, BLOCK=16)
    assert device.launches[-1][7] is hook


def test_what_triton_interprets_stays_as_it_is() -> None:
    def other() -> None: ...

    assert quick(other) is other


def test_sizes_are_those_of_triton() -> None:
    assert [next_power_of_2(n) for n in range(70)] == [triton.next_power_of_2(n) for n in range(70)]
    assert [cdiv(n, 7) for n in range(30)] == [triton.cdiv(n, 7) for n in range(30)]


def test_triton_is_prepared_beside_other_work() -> None:
    cache.triton_key.cache_clear()
    prepare_triton().join()
    assert cache.triton_key.cache_info().currsize == 1  # no kernel has to wait for it


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_kernels_are_compiled_ahead_of_their_launch(
    device: Device, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    own = quick(JITFunction(add_kernel))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **x: compiled.append("one"))
    seen: list[torch.Tensor] = []

    def run() -> None:
        for grid, args, constants in CALLS * 2:
            own[grid](*args, **constants)
        seen.extend([torch.empty(3), torch.empty_like(X), X.new_empty(2, 2)])

    assert launch.compile_ahead(run, "key") == 7
    assert len(compiled) == 7 and device.launches == []
    assert all((tensor == 0).all() for tensor in seen)
    run()
    assert len(compiled) == 7 and len(device.launches) == 16  # nothing is compiled a second time
    assert launch.compile_ahead(pytest.fail, "key") == 0  # all lie in the cache
    assert launch.compile_ahead(run, "another key") == 0  # all are loaded
    assert len(list(fresh_cache.glob("tokenmill-*"))) == 2


def test_what_is_compiled_is_not_launched_ahead_either(device: Device, fresh_cache: Path) -> None:
    """Its inputs may be what another kernel, which is not launched, would have written."""
    own = quick(JITFunction(add_kernel))
    grid, args, constants = CALLS[0]
    own[grid](*args, **constants)
    assert launch.compile_ahead(partial(own[grid], *args, **constants), "key") == 0
    assert len(device.launches) == 1


def test_an_interrupt_leaves_nothing_to_wait_for(device: Device, fresh_cache: Path) -> None:
    own = quick(JITFunction(add_kernel))

    def run() -> None:
        own[(3,)](X, X, 33, 2, BLOCK=16)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.compile_ahead(run, "key")
    assert not list(fresh_cache.glob("tokenmill-*"))


def test_what_was_asked_before_an_error_is_compiled(device: Device, fresh_cache: Path) -> None:
    own = quick(JITFunction(add_kernel))

    def run() -> None:
        own[(3,)](X, X, 33, 2, BLOCK=16)
        raise ValueError("a step does not run")

    assert launch.compile_ahead(run, "key") == 0
    assert list(fresh_cache.rglob("*.cubin"))
    own[(3,)](X, X, 33, 2, BLOCK=16)
    assert len(device.launches) == 1


def noted(folder: Path, name: str) -> SimpleNamespace:
    """In place of a compilation: says who did it."""
    if name == "wrong":
        raise ValueError(name)
    with (folder / name).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return SimpleNamespace(src=None, metadata=None)


def test_processes_compile_every_kernel_once(device: Device, tmp_path: Path) -> None:
    names = ["wrong", *map(str, range(40)), "wrong"]
    launch.compile_in_processes([partial(noted, tmp_path, name) for name in names])
    assert {file.name for file in tmp_path.iterdir()} == {*names} - {"wrong"}
    done = [file.read_text().split() for file in tmp_path.iterdir()]
    assert all(len(each) == 1 and each != [str(os.getpid())] for each in done)


def test_a_process_that_hangs_is_ended(
    device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, fork = list[int](), launch._fork
    monkeypatch.setattr(launch, "_fork", lambda work: processes.append(fork(work)) or processes[-1])
    launch.compile_in_processes([partial(time.sleep, 1000)], seconds=0.0)
    assert "1 processes that compile kernels" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(processes[0], 0)


def test_without_other_processes_this_one_compiles(
    device: Device, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fork)
    own = quick(JITFunction(add_kernel))
    assert launch.compile_ahead(partial(own[(3,)], X, X, 33, 2, BLOCK=16), "key") == 1
    assert list(fresh_cache.rglob("*.cubin"))


def test_what_fails_ahead_is_left_to_the_first_launch(device: Device, fresh_cache: Path) -> None:
    wrong, right = quick(JITFunction(wrong_kernel)), quick(JITFunction(add_kernel))
    run = partial(wrong[(1,)], X, BLOCK=16)
    assert launch.compile_ahead(run, "key") == 0
    assert not list(fresh_cache.glob("tokenmill-*"))
    with pytest.raises(Exception, match="no_such_name"):
        run()
    right[(3,)](X, X, 33, 2, BLOCK=16)
    assert len(device.launches) == 1
