"""Who imports whom: the table of units, one home per library, and what must stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(tokenmill.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

ENGINE_PATH = {"core", "sched", "parallel", "kernels", "layers", "models", "engine"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "sched": {"core"},
    "parallel": {"core"},
    "kernels": set(),
    "layers": {"core", "parallel", "kernels"},
    "models": {"core", "parallel", "kernels", "layers"},
    "engine": ENGINE_PATH - {"engine"},
    "serve": {"core", "sched"},
    "bench": {"core"},
    "plan": {"core", "sched"},
    "settings": {"core"},
    "llm": {"core", "models", "engine", "serve"},
    "cli": ENGINE_PATH | {"serve", "bench", "plan", "settings", "llm"},
    "__main__": {"core", "settings", "cli"},
    "demo": {"core", "cli"},
    "__init__": {"core", "llm"},
}
PEERS = ("transformers", "xllamacpp", "openvino", "openvino_genai", "ctranslate2", "vllm")
TORCH_BENCHES = ("cli/ceiling", "cli/kv_transfer", "bench/peer_runners")
HOMES: dict[str, tuple[str, ...]] = {
    "numpy": ("core/", "sched/", "kernels/", "layers/", "models/", "engine/", "bench/peer_runners"),
    "torch": ("parallel", "kernels/", "layers/", "models/", "engine/", *TORCH_BENCHES),
    "triton": ("kernels/",),
    "numba": ("kernels/cpu/",),
    "llvmlite": ("kernels/cpu/",),
    "safetensors": ("models/weights",),
    "gguf": ("models/gguf",),
    "huggingface_hub": ("models/store",),
    "xgrammar": ("engine/grammar",),
    "nixl": ("engine/kv_nixl",),
    "fastapi": ("serve/api",),
    "starlette": ("serve/api",),
    "uvicorn": ("serve/server",),
    "tokenizers": ("serve/tokenizer",),
    "jinja2": ("serve/chat_template",),
    "prometheus_client": ("serve/metrics",),
    "msgspec": ("serve/", "bench/wire"),
    "httptools": ("bench/client", "serve/upstream", "serve/server_connection"),
    "uvloop": ("bench/issue",),
    "zmq": ("serve/wire", "serve/worker"),
    "ray": ("serve/supervisor",),
    "mlperf_loadgen": ("bench/loadgen",),
    "rouge_score": ("bench/accuracy",),
    "nltk": ("bench/accuracy",),
    "typer": ("cli/", "__main__"),
    "rich": ("cli/", "demo"),
    "openai": ("demo",),
    "tqdm": ("llm",),
    "opentelemetry": ("serve/tracing",),
    **dict.fromkeys(PEERS, ("bench/peer_runners",)),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def unit_of(dotted: str) -> str:
    """The unit of "tokenmill.serve.api" is "serve"; that of "tokenmill" is "__init__"."""
    return [*dotted.split("."), "__init__"][1]


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all imports of a module, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} has a relative import"
            if node.module == "tokenmill":
                yield from (_imported(alias.name) for alias in node.names)
            else:
                yield node.module or ""


def _imported(name: str) -> str:
    """`from tokenmill import x` is the unit x, or a name of the package itself."""
    is_unit = (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()
    return f"tokenmill.{name}" if is_unit else "tokenmill"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_units_follow_the_table(path: Path) -> None:
    unit = name_of(path).split("/")[0]
    allowed = ALLOWED[unit] | {unit, "__init__"}
    ours = [name for name in imports(path) if name.split(".")[0] == "tokenmill"]
    wrong = [name for name in ours if unit_of(name) not in allowed]
    assert not wrong, f"{name_of(path)} may not import {wrong}; {unit} may: {sorted(allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_libraries_stay_at_home(path: Path) -> None:
    for name in imports(path):
        library = name.split(".")[0]
        if library == "tokenmill" or library in sys.stdlib_module_names:
            continue
        assert library in HOMES, f"{name_of(path)} imports {library}, which has no home"
        homes = HOMES[library]
        assert name_of(path).startswith(homes), f"{library} belongs in {homes}"


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def modules_of(unit: str) -> list[str]:
    names = [name_of(p) for p in MODULES if name_of(p).split("/")[0] == unit]
    return ["tokenmill." + n.replace("/", ".").removesuffix(".__init__") for n in names]


@pytest.mark.parametrize("unit", ["core", "sched", "plan", "serve", "settings", "bench"])
def test_no_torch_in(unit: str) -> None:
    code = f"""
import importlib, sys
for name in {modules_of(unit)!r}:
    importlib.import_module(name)
print("torch" in sys.modules)
"""
    assert run_python(code).strip() == "False"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_is_light(arguments: list[str]) -> None:
    code = f"""
import sys
from tokenmill.__main__ import run
assert run({arguments!r}) == 0
heavy = "torch numpy fastapi tokenizers zmq msgspec gguf openai".split()
print([name for name in heavy if name in sys.modules])
"""
    assert run_python(code).splitlines()[-1] == "[]"


def test_engine_path_needs_torch_triton_numpy_and_safetensors_only() -> None:
    refused = sorted(HOMES.keys() - {"torch", "triton", "numpy", "safetensors"})
    names = [name for unit in sorted(ENGINE_PATH) for name in modules_of(unit)]
    # kernels/cpu is where numba lives; it is imported only where numba is installed.
    names = [name for name in names if not name.startswith("tokenmill.kernels.cpu.")]
    code = f"""
import importlib, importlib.util, sys
REFUSED = set({refused!r})
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
for name in {names!r}:
    importlib.import_module(name)
print(sorted(REFUSED & {{name.split(".")[0] for name in sys.modules}}))
"""
    assert run_python(code).strip() == "[]"
