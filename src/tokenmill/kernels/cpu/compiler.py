"""How everything here is compiled: numba settings and a cache that follows the sources."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, njit
from numba.core import caching
from numba.extending import intrinsic

# No 'nnan'/'ninf': masked scores are large negative numbers, never infinities. No 'reassoc': copies
# of a function in several callers would round differently, and so would code compiled here from
# code out of the cache.
FASTMATH = {"contract", "nsz", "arcp"}
ROOM_BYTES = 32 * 2**20  # of disk for compiled code


ISA = os.environ.get("TOKENMILL_CPU_ISA", "")  # "avx2" holds a wider CPU to it
_VNNI = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")


def supported() -> bool:
    """True on x86-64 with AVX2 and FMA, which the tiles are written for."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx2") and features.get("fma"))


def _has_vnni() -> bool:
    """AVX-512 with vpdpbusd is there and not switched off."""
    if ISA not in ("", "avx2"):
        raise ValueError(f"TOKENMILL_CPU_ISA is {ISA!r}: use avx2, or leave it unset")
    features = llvm.get_host_cpu_features()
    return not ISA and all(features.get(name) for name in _VNNI)


VNNI = _has_vnni()
if ISA and not config.CPU_FEATURES:  # what LLVM makes of plain loops is held to AVX2, too
    _all = llvm.get_host_cpu_features()
    _kept = {name: on and not name.startswith("avx512") for name, on in _all.items()}
    config.CPU_FEATURES = ",".join(f"{'+' if on else '-'}{name}" for name, on in _kept.items())


def _cache_folder() -> str:
    """Compiled code is kept per version of these sources: numba alone watches only one file."""
    digest = hashlib.sha256(f"{llvm.get_host_cpu_name()} {ISA}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = os.environ.get("TOKENMILL_CACHE", "~/.cache/tokenmill")
    return str(Path(root).expanduser() / "kernels" / digest.hexdigest()[:16])


_CACHE_FOLDER = _cache_folder()
_LOCATION = {"CACHE_DIR": _CACHE_FOLDER, "CACHE_LOCATOR_CLASSES": f"{__name__}.SharedFolder"}


def cached(decorate: Callable[[Any], Any], function: Any) -> Any:
    """Apply a numba decorator with our cache folder, leaving numba's own settings as they were."""
    before = {name: getattr(config, name, "") for name in _LOCATION}
    with _alone():
        vars(config).update(_LOCATION if _has_room() else {})
        try:
            return decorate(function)
        finally:
            vars(config).update(before)


def _has_room() -> bool:
    """True if compiled code can be kept; else each process compiles for itself."""
    if not os.access(_CACHE_FOLDER, os.W_OK):
        return False
    disk = os.statvfs(_CACHE_FOLDER)
    return disk.f_bavail * disk.f_frsize >= ROOM_BYTES


@contextmanager
def _alone() -> Iterator[None]:
    """Of processes that start together one compiles; the others wait and find it in the cache."""
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that cannot be written: each compiles for itself
            Path(_CACHE_FOLDER).mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(Path(_CACHE_FOLDER, "lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class SharedFolder(caching._CacheLocator):
    """Compiled code is found by what the sources hold, so copies of them share it."""

    def __init__(self, line: int, path: str) -> None:
        self._line, self._path = line, path

    @classmethod
    def from_function(cls, function: Any, path: str) -> SharedFolder:
        return cls(function.__code__.co_firstlineno, path)

    def get_cache_path(self) -> str:
        return _CACHE_FOLDER

    def get_source_stamp(self) -> str:
        return hashlib.sha256(Path(self._path).read_bytes()).hexdigest()

    def get_disambiguator(self) -> str:
        return str(self._line)


def compiled(function: Any) -> Any:
    """numba.njit as used here: no GIL, contraction allowed, cached."""
    return cached(njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True), function)


def emitted(kind: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make `emit(b, *values)`, which writes LLVM IR, a function of compiled code, typed `kind`."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def define(typing_context: Any, *args: Any) -> Any:
            def generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
                result = emit(b, *values)
                return context.get_dummy_value() if result is None else result

            return kind, generate

        own = list(inspect.signature(define).parameters.values())[:1]
        given = list(inspect.signature(emit).parameters.values())[1:]
        define.__signature__ = inspect.Signature(own + given)  # type: ignore[attr-defined]
        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(define)

    return decorate
