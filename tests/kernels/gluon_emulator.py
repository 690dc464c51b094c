"""Runs a Gluon kernel for Hopper on CPU, for which Triton has no interpreter.

Each partition of warps is a thread; barriers count arrivals and phases as the hardware does. A
product is computed as late as the kernel allows, at the wait that covers it, from what lies in
shared memory then: a tile that is given back too early gives a wrong result, and a barrier that
nobody completes ends the run. Layouts are not modelled: the compiler checks them.
"""

from __future__ import annotations

import itertools
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

PATIENCE_S = 120.0
DTYPES = {
    gl.bfloat16: torch.bfloat16,
    gl.float32: torch.float32,
    gl.int8: torch.int8,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.float8e4nv: torch.float8_e4m3fn,
}
NAMES = {own: name for name, own in DTYPES.items()}


class Tensor:
    """A tensor whose operations make new ones, as in a kernel."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> Any:
        return NAMES[self.data.dtype]

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        own = DTYPES[dtype]
        return Tensor(self.data.view(own) if bitcast else self.data.to(own))

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return Tensor(self.data.permute(order))

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.data[key])

    def __neg__(self) -> Tensor:
        return Tensor(-self.data)


def _raw(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def _operator(name: str) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Tensor(getattr(self.data, name)(_raw(other)))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("and", "or", "lshift", "rshift", "lt", "ge", "eq"):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("radd", "rmul", "rtruediv"):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


class Pointer:
    def __init__(self, storage: torch.Tensor, offset: Any = 0) -> None:
        self.storage, self.offset = storage.view(-1), offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + _raw(other))


class Scalar(int):
    """An integer with `.to`, which programs call on their ids."""

    def to(self, dtype: Any) -> Scalar:
        return self

    def __mul__(self, other: Any) -> Any:
        return _scalar(int.__mul__(self, other) if isinstance(other, int) else NotImplemented)

    def __add__(self, other: Any) -> Any:
        return _scalar(int.__add__(self, other) if isinstance(other, int) else NotImplemented)


def _scalar(x: Any) -> Any:
    return Scalar(x) if isinstance(x, int) else x


class Shared:
    """A piece of shared memory; views see what is written later."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> Any:
        return NAMES[self.data.dtype]

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def _reinterpret(self, dtype: Any, shape: tuple[int, ...], layout: Any) -> Shared:
        assert dtype == self.dtype
        return Shared(self.data.view(*shape))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value.data)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.clone())


class Barrier:
    """Phases complete when so many arrivals, and all expected bytes, have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.phase = 0
        self.bytes_left = 0

    def update(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes_left += num_bytes
            if self.left == 0 and self.bytes_left == 0:
                self.phase, self.left = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: (self.phase - 1) & 1 == parity, PATIENCE_S)
        assert done, "a barrier was never completed"


class Barriers:
    def __init__(self, shape: list[int]) -> None:
        self.all = [Barrier() for _ in range(shape[0])]

    def index(self, i: int) -> Barrier:
        return self.all[i]


class Descriptor:
    """A tensor of which tiles are copied; what lies past its end is zero."""

    def __init__(self, matrix: torch.Tensor, block: tuple[int, ...]) -> None:
        self.matrix, self.block, self.layout = matrix, block, None
        self.dtype = NAMES[matrix.dtype]
        nbytes = math.prod(block) * matrix.element_size()
        self.block_type = types.SimpleNamespace(nbytes=nbytes, shape=block)

    def copy(self, place: list[int], barrier: Barrier, target: Shared) -> None:
        assert tuple(target.data.shape) == tuple(self.block)
        before = [max(0, -first) for first in place]  # what lies before the first row is zero, too
        within = zip(place, before, self.block, strict=True)
        piece = self.matrix[tuple(slice(f + skip, f + size) for f, skip, size in within)]
        target.data.zero_()
        inside = zip(before, piece.shape, strict=True)
        target.data[tuple(slice(skip, skip + size) for skip, size in inside)] = piece
        barrier.update(num_bytes=-self.block_type.nbytes)


class Product:
    """A product that was begun; it is computed when it is waited for, and has no data before."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.parts = (a, b, acc, use_acc)
        self.value: Tensor | None = None
        PENDING.queue.append(self)

    def finish(self) -> None:
        a, b, acc, use_acc = self.parts
        if isinstance(acc, Product):  # one begun earlier
            assert acc.value is not None
            acc = acc.value
        if a.data.dtype == torch.int8:
            product = a.data.int() @ b.data.int()
        else:
            product = a.data.float() @ b.data.float()
        self.value = Tensor(product + acc.data if use_acc else product)


class _Pending(threading.local):
    def __init__(self) -> None:
        self.queue: list[Product] = []


PENDING = _Pending()


def _multiply(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product(a, b, acc, use_acc)
    return product if is_async else _wait(0, (product,))


def _wait(pendings: int, deps: tuple[Any, ...]) -> Any:
    while len(PENDING.queue) > pendings:
        PENDING.queue.pop(0).finish()
    found = [dep.value or dep if isinstance(dep, Product) else dep for dep in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    if isinstance(pointer.offset, int):
        assert 0 <= pointer.offset < len(pointer.storage), "a load past the end"
        found = pointer.storage[pointer.offset]
        return Tensor(found) if found.is_floating_point() else Scalar(int(found))
    if mask is None:
        return Tensor(pointer.storage[pointer.offset.long()])
    seen = mask.data.expand(pointer.offset.shape)
    found = pointer.storage[torch.where(seen, pointer.offset, 0)]
    return Tensor(torch.where(seen, found, other).to(found.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    seen = mask.data.expand(value.data.shape)
    pointer.storage[pointer.offset.expand(value.data.shape)[seen]] = value.data[seen]


def _asm(code: str, constraints: str, args: list[Tensor], dtype: Any, **_: Any) -> Tensor:
    """The two pieces of PTX that kernels have."""
    if "ex2" in code:
        return Tensor(torch.exp2(args[0].data))
    assert "e4m3x2" in code
    return Tensor(args[0].data.clamp(-448.0, 448.0).to(DTYPES[dtype]))


def _specialize(functions: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    faults: list[BaseException] = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
            assert not PENDING.queue, "a product was not waited for"
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=part) for part in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def _largest(x: Any, y: Any) -> Any:
    if isinstance(x, Tensor):
        return Tensor(torch.maximum(x.data, y.data))
    return Scalar(max(x, y))


def _language(program: tuple[int, ...], grid: tuple[int, ...]) -> types.SimpleNamespace:
    def filled(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
        return Tensor(torch.full(shape, _raw(value), dtype=DTYPES[dtype]))

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == gl.int64:
            return Barriers(shape) if len(shape) == 2 else Barrier()
        return Shared(torch.empty(shape, dtype=DTYPES[dtype]))

    plain = {name: getattr(gl, name) for name in ("bfloat16", "float32", "int8", "int32", "int64")}
    return types.SimpleNamespace(
        **plain, float8e4nv=gl.float8e4nv, constexpr=gl.constexpr, static_range=range,
        SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
        NVMMADistributedLayout=lambda *_: None, program_id=lambda axis: Scalar(program[axis]),
        num_programs=lambda axis: Scalar(grid[axis]), cdiv=lambda a, b: Scalar(-(-a // b)),
        arange=lambda start, end, layout=None: Tensor(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout=None: filled(shape, 0, dtype), full=filled,
        zeros_like=lambda x: Tensor(torch.zeros_like(x.data)),
        where=lambda seen, x, y: Tensor(torch.where(seen.data, _raw(x), _raw(y))),
        maximum=_largest, minimum=lambda x, y: Scalar(min(x, y)),
        max=lambda x, axis: Tensor(x.data.amax(axis)), sum=lambda x, axis: Tensor(x.data.sum(axis)),
        exp=lambda x: Tensor(x.data.exp()),
        convert_layout=lambda x, layout, assert_trivial=False: x, load=_load, store=_store,
        inline_asm_elementwise=_asm, allocate_shared_memory=allocate, warp_specialize=_specialize,
    )  # fmt: skip


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


_MBARRIER = types.SimpleNamespace(
    init=_init,
    MBarrierLayout=lambda: None,
    wait=lambda barrier, phase: barrier.wait(phase),
    expect=lambda barrier, num_bytes: barrier.update(arrivals=1, num_bytes=num_bytes),
    arrive=lambda barrier, count, pred=True: pred and barrier.update(arrivals=count),
)
_TMA = types.SimpleNamespace(
    async_copy_global_to_shared=lambda matrix, place, barrier, target: matrix.copy(
        place, barrier, target
    )
)


def run(
    module: types.ModuleType, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any
) -> None:
    """All programs of a kernel of `module`, one after the other."""
    for program in itertools.product(*(range(size) for size in grid)):
        space = dict(vars(module))
        for value in vars(module).values():  # what kernels of other modules use
            if isinstance(value, JITFunction | InterpretedFunction):
                space = value.fn.__globals__ | space
        space |= {
            "gl": _language(program, grid), "mbarrier": _MBARRIER, "tma": _TMA,
            "wait": lambda *_: None,
            "warpgroup_mma": _multiply, "warpgroup_mma_wait": lambda n, deps: _wait(n, deps),
            "fence_async_shared": lambda: None,
        }  # fmt: skip
        for name, value in list(space.items()):
            if isinstance(value, JITFunction | InterpretedFunction):
                space[name] = types.FunctionType(
                    value.fn.__code__, space, name, value.fn.__defaults__
                )
            elif isinstance(value, gl.constexpr):
                space[name] = value.value
        space[kernel](*args, **constants)
