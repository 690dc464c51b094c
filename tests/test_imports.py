"""Who imports whom: the table of units, one home per library, and what must stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(tokenmill.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

POLICY = {"core", "sched", "routing"}
TORCH_ENGINES = {"engine", "ranking", "video"}
ENGINE_PATH = POLICY | TORCH_ENGINES | {"parallel", "kernels", "layers", "models", "kv"}
FRONT = POLICY | {"text", "vision", "workers", "api"}
TERMINAL = {"settings", "console"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "sched": {"core"},
    "routing": {"core", "sched"},
    "engine_events": POLICY,
    "parallel": {"core"},
    "kernels": set(),
    "layers": {"core", "parallel", "kernels"},
    "models": {"core", "parallel", "kernels", "layers"},
    "kv": {"core", "sched", "kernels"},
    "engine": ENGINE_PATH - TORCH_ENGINES,
    "ranking": {"core", "parallel", "kernels", "layers", "models"},
    "video": {"core", "parallel", "kernels", "layers", "models", "engine"},
    "text": {"core"},
    "vision": {"core", "http_connection"},
    "workers": POLICY | {"engine_events"},
    "api": FRONT - {"api"} | {"http_connection", "engine_events"},
    "http_connection": set(),
    "proxy": FRONT | {"http_connection", "engine_events"},
    "settings": {"core"},
    "console": {"core", "models"},
    "bench": {"core", "text", "routing", "http_connection"},
    "bench/ceiling": {"core", "kernels"},
    "bench/mlperf/samples": {"core", "text", "vision"},
    "bench/mlperf/ranking": {"core", "ranking", "settings"},
    "bench/mlperf/video": {"core", "http_connection", "models", "settings", "text", "video"},
    "bench/mlperf/language": {"console", "core", "engine", "models", "settings", "text"},
    "bench/mlperf/under_test": {"core", "http_connection", "settings"},
    "bench/mlperf/loadgen_tests": TERMINAL | {"core"},
    "bench/report/result_folder": {"core", "console"},
    "bench/client/live_progress": {"core", "console"},
    "bench/endpoint_load": TERMINAL | {"core", "text"},
    "bench/endpoint_saturation": TERMINAL | {"core"},
    "bench/commands": ENGINE_PATH | FRONT | TERMINAL,
    "plan": POLICY | {"engine_events", "bench"},
    "llm": {"core", "models", "engine", "text", "settings"},
    "async_llm": {"core", "llm"},
    "cli": ENGINE_PATH | FRONT | TERMINAL | {"proxy", "bench", "plan", "llm", "demo"},
    "__main__": {"core", "settings", "cli", "console"},
    "demo": {"core", "console", "bench"},
    "__init__": {"core", "llm", "async_llm"},
}
MAX_MODULES = 20  # of a package, with its __init__; bench/commands has one for each command
TORCH_BENCHES = ("bench/ceiling",)
ENGINE = ("kernels/", "layers/", "models/", "engine/", "kv/", "ranking/", "video/")
NUMPY = ("core/", "sched/", "routing/", *ENGINE)
HOMES: dict[str, tuple[str, ...]] = {
    "numpy": (
        *NUMPY,
        "engine_events/engine_blocks",
        "bench/mlperf/samples",
        "bench/results/intervals",
        "vision/processor",
        "vision/image_files",
    ),
    "PIL": ("vision/image_files",),
    "av": ("video/video_files",),
    "torch": ("parallel", *ENGINE, *TORCH_BENCHES),
    "triton": ("kernels/",),
    "numba": ("kernels/cpu/",),
    "llvmlite": ("kernels/cpu/",),
    "safetensors": (
        "models/checkpoints/weights",
        "models/checkpoints/random_folder",
        "ranking/model_files",
        "ranking/stores/table_files",
    ),
    "gguf": ("models/checkpoints/gguf",),
    "huggingface_hub": ("models/checkpoints/hub",),
    "xgrammar": ("engine/sampling/grammar",),
    "nixl": ("kv/nixl_connector",),
    "fastapi": ("api/", "proxy/proxy_routes"),
    "starlette": ("api/", "proxy/"),
    "uvicorn": ("api/server", "api/connection", "proxy/proxy_server"),
    "tokenizers": ("text/tokenizer",),
    "jinja2": ("text/chat_template",),
    "prometheus_client": (
        *("api/telemetry/job_metrics", "api/telemetry/prometheus", "api/videos/video_metrics"),
        *("proxy/proxy_metrics", "bench/client/scrape"),
    ),
    "msgspec": (
        *("api/", "core/requests", "core/tasks", "workers/", "proxy/", "bench/", "demo"),
        *("engine_events/wire", "engine/ranks/"),
    ),
    "httptools": ("http_connection", "api/connection"),
    "uvloop": ("bench/client/client_process",),
    "datasets": ("bench/client/datasets",),
    "zmq": (
        *("workers/link", "workers/fronts/front_link", "workers/fronts/control_socket"),
        *("proxy/event_source", "engine_events/publisher"),
    ),
    "ray": ("workers/ray_placement",),
    "mlperf_loadgen": ("bench/mlperf/loadgen",),
    "rouge_score": ("bench/mlperf/accuracy",),
    "nltk": ("bench/mlperf/accuracy",),
    "typer": ("cli/", "settings/options", "settings/help_page", "bench/commands/", "__main__"),
    "rich": ("cli/", "settings/help_page", "bench/client/live_progress", "console"),
    "openai": ("demo",),
    "tqdm": ("llm",),
    "opentelemetry": ("api/telemetry/tracing",),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def row_of(name: str) -> str:
    """The row of the table that holds for a module: the one that names most of its path."""
    parts = name.split("/")
    rows = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next(row for row in rows if row in ALLOWED)


def unit_of(dotted: str) -> str:
    """The unit of "tokenmill.api.openai_routes" is "serve"; that of "tokenmill" is "__init__"."""
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
    unit = row_of(name_of(path))
    allowed = ALLOWED[unit] | {unit.split("/")[0], "__init__"}
    ours = [name for name in imports(path) if name.split(".")[0] == "tokenmill"]
    wrong = [name for name in ours if unit_of(name) not in allowed]
    assert not wrong, f"{name_of(path)} may not import {wrong}; {unit} may: {sorted(allowed)}"


def test_no_package_is_a_heap() -> None:
    counts = Counter(path.parent for path in MODULES)
    heaps = {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MAX_MODULES}
    assert not heaps, f"split these packages: {heaps}"


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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def modules_of(unit: str) -> list[str]:
    names = [name_of(p) for p in MODULES if name_of(p).split("/")[0] == unit]
    names = [name for name in names if name not in TORCH_BENCHES]  # run in processes of their own
    return ["tokenmill." + n.replace("/", ".").removesuffix(".__init__") for n in names]


@pytest.mark.parametrize("unit", sorted(FRONT | {"proxy", "settings", "bench", "plan"}))
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


def test_engine_path_needs_few_libraries_only() -> None:
    refused = sorted(HOMES.keys() - {"torch", "triton", "numpy", "safetensors", "msgspec"})
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


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.rglob("*.py")), ids=str)
def test_tests_stand_alone(path: Path) -> None:
    """They import no other test module, read no private names of a pool, and hash no strings."""
    block_pools = "sched" in path.parts or path.stem == "scheduler_integrity"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            last = (node.module or "").rpartition(".")[2]
            assert not last.startswith("test_"), f"line {node.lineno} imports {node.module}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hash", f"line {node.lineno}: hash() differs by process"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value).rpartition(".")[2]
            is_pool = owner == "pool" and not block_pools
            assert not is_pool, f"line {node.lineno} reads pool.{node.attr}"
