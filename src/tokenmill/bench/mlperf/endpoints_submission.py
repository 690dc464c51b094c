"""The folder of an MLPerf Endpoints submission, as endpoints-submission-cli 1.5.3 checks it.

disclosure.toml asks for what only the submitter knows: [submission] names the folders, [point] and
[seeds] fill point.yaml, [system] fills system_desc.json. [point] and [system] may have more keys.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench.client.load_run import Run
from tokenmill.bench.client.records import LoadRecord, write_records
from tokenmill.bench.client.summary import num_tokens, times_of
from tokenmill.bench.mlperf.regions import Regions
from tokenmill.bench.results.mlperf_reports import Fields
from tokenmill.bench.results.reports import PointReport
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import NS_PER_MS, percentile, tok_s_user

PERCENTILES = (99.9, 99, 97, 95, 90, 80, 75, 50, 25, 10, 5, 1)
NOT_VALID = "not_a_valid_submission"  # the key, and the name of the file, that says so
WARMUP_LOG = "warmup_events.jsonl"
TEMPLATE = Path(__file__).with_name("disclosure.toml")  # every value is left open
MEASURED = ("max_supported_concurrency", "tps_utilization")  # written by the campaign
_PLACEHOLDER = re.compile(r"\s*|.*\b(todo|tbd|fixme|placeholder)\b.*|<.*>|\?+|x{3,}", re.I | re.S)
_FOLDER = re.compile(r"[A-Za-z0-9][\w.\-]*")
_LINE = re.compile(r'\[+([\w.]+)\]|(\w+) = ""(?:  # (a number))?')


@dataclass(frozen=True, slots=True)
class Disclosure:
    submission: dict[str, Any]
    point: dict[str, Any]
    seeds: dict[str, int]
    system: dict[str, Any]

    @property
    def src(self) -> Path:
        return Path(self.submission["src"])

    @property
    def docs(self) -> Path:
        return Path(self.submission["docs"])

    @property
    def power(self) -> Path | None:
        return Path(self.submission["power"]) if "power" in self.submission else None


def required_values() -> dict[str, dict[str, type]]:
    """By table what the template asks for: texts and whole numbers."""
    found: dict[str, dict[str, type]] = {}
    for line in TEMPLATE.read_text(encoding="utf-8").splitlines():
        match = _LINE.match(line)
        if match and match[1]:
            table = found[match[1]] = {}
        elif match:
            table[match[2]] = int if match[3] else str
    return found


def read_disclosure(path: Path) -> Disclosure:
    """Every required value is there, has its type and is no placeholder; folders exist."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"--disclosure {path}: cannot read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"--disclosure {path}: not a TOML file: {error}") from None
    where = f"--disclosure {path}"
    tables = {name: _table(found, name, where) for name in ("submission", "point", "seeds")}
    system = _table(found, "system", where)
    nodes = system.get("node_types")
    if not isinstance(nodes, list) or not nodes:
        raise BenchError(
            f"{where}: [[system.node_types]] is missing: give one for each kind of node"
        )
    for node in nodes:
        _check(node, "system.node_types", where)
    for key in MEASURED:
        if key in system or key in tables["point"]:
            raise BenchError(f"{where}: {key} is measured by the campaign: leave it out")
    for key in ("organization", "submission_id", "system"):
        if not _FOLDER.fullmatch(tables["submission"][key]):
            raise BenchError(f"{where}: [submission] {key} must be the name of a folder")
    disclosure = Disclosure(**tables, system=system)
    _check_files(disclosure, where)
    return disclosure


def _table(found: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    table = found.get(name)
    if not isinstance(table, dict):
        raise BenchError(f"{where}: [{name}] is missing")
    _check(table, name, where)
    return table


def _check(table: Any, name: str, where: str) -> None:
    required = required_values()[name]
    for key in required:
        if not isinstance(table, dict) or key not in table:
            raise BenchError(f"{where}: [{name}] {key} is missing")
    for key, value in table.items():
        if isinstance(value, str) and _PLACEHOLDER.fullmatch(value):
            raise BenchError(f"{where}: [{name}] {key} is not filled in yet, it is {value!r}")
        if key in required and type(value) is not required[key]:
            kind = "a whole number" if required[key] is int else "a text"
            raise BenchError(f"{where}: [{name}] {key} must be {kind}, got {value!r}")


def _check_files(disclosure: Disclosure, where: str) -> None:
    if not (disclosure.src / "README.md").is_file():
        raise BenchError(f"{where}: [submission] src = {disclosure.src}: there is no README.md")
    if not disclosure.docs.is_dir():
        raise BenchError(f"{where}: [submission] docs = {disclosure.docs}: no such folder")
    if disclosure.power is not None and not disclosure.power.is_file():
        raise BenchError(f"{where}: [submission] power = {disclosure.power}: no such file")


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    concurrency: int
    result: Fields
    warmup: Fields
    warmup_records: Sequence[LoadRecord]


def measured_point(run: Run, point: PointReport) -> MeasuredPoint:
    concurrency = run.load.concurrency or 0
    slots = min(concurrency, len(run.warmup))
    return MeasuredPoint(
        concurrency, result_summary(run.records, point), warmup_of(run.warmup, slots), run.warmup
    )


def result_summary(records: Sequence[LoadRecord], point: PointReport) -> Fields:
    """The reference client's report; times in ns."""
    whole = [record for record in records if record.error is None]
    times = [times_of(record, stream=True) for record in whole]
    lengths = [float(num_tokens(record, stream=True)) for record in whole]
    return {
        "n_samples_issued": len(records),
        "n_samples_completed": len(whole),
        "n_samples_failed": len(records) - len(whole),
        "duration_ns": round(point.seconds * 1e9),
        "qps": point.request_s,
        "tps": point.output_tok_s,
        "system_tps": point.output_tok_s,
        "tps_per_user": tok_s_user(point.tpot_ms or {}),
        "ttft": _series([t.ttft_ms for t in times], NS_PER_MS),
        "tpot": _series([t.tpot_ms for t in times], NS_PER_MS),
        "latency": _series([t.e2e_ms for t in times], NS_PER_MS),
        "output_sequence_lengths": _series(lengths),
        "input_sequence_lengths": _series([float(r.prompt_tokens or 0) for r in whole]),
        "finish_reason_counts": dict(Counter(str(r.finish_reason) for r in whole)),
    }


def _series(values: Sequence[float | None], scale: float = 1.0) -> Fields:
    known = [value * scale for value in values if value is not None]
    if not known:
        return {"total": 0.0, "percentiles": {}}
    mean = sum(known) / len(known)
    return {
        "total": sum(known),
        "min": min(known),
        "max": max(known),
        "median": percentile(known, 50),
        "avg": mean,
        "std_dev": math.sqrt(sum((value - mean) ** 2 for value in known) / len(known)),
        "percentiles": {f"{percent:g}": percentile(known, percent) for percent in PERCENTILES},
    }


def warmup_of(records: Sequence[LoadRecord], slots: int) -> Fields:
    """The declaration of point.yaml, from the records of the warm-up."""
    seconds = 0.0
    if records:
        seconds = (max(r.end_ns for r in records) - min(r.sent_ns for r in records)) / 1e9
    declared: Fields = {
        "duration_s": round(max(seconds, 0.0), 3),
        "requests_issued": len(records),
        "requests_completed": sum(record.error is None for record in records),
        "data_source": "synthetic words, none of the measured samples" if records else "none",
        "concurrency": slots,
        "logs_retained": bool(records),
    }
    if records:
        declared["link_logs"] = WARMUP_LOG
    return declared


@dataclass(frozen=True, slots=True)
class CampaignFacts:
    disclosure: Disclosure
    regions: Regions
    min_durations_s: Mapping[int, float]
    config: Fields  # as it was run
    reasons: Sequence[str]  # why this is not a valid submission

    def seconds(self, point: MeasuredPoint) -> float:
        return self.min_durations_s[point.concurrency]

    @property
    def mark(self) -> dict[str, list[str]]:
        return {NOT_VALID: list(self.reasons)} if self.reasons else {}


def write_submission(
    folder: Path, campaign: CampaignFacts, points: Sequence[MeasuredPoint]
) -> tuple[Path, list[str]]:
    """(the submission's folder, its files below). An older one there is refused."""
    names = campaign.disclosure.submission
    root = folder / names["organization"] / names["submission_id"]
    check_root(root)
    model = root / "results" / names["system"] / campaign.disclosure.point["model_name"]
    best = max((point.result["system_tps"] for point in points), default=0.0)
    for point in points:
        _write_point(model / f"r{point.concurrency}", campaign, point, best)
    shutil.copytree(campaign.disclosure.src, root / "src" / _src_name(campaign.disclosure))
    shutil.copytree(campaign.disclosure.docs, root / "docs")
    if campaign.disclosure.power is not None:
        shutil.copyfile(campaign.disclosure.power, model.parent / "system_power.json")
    if campaign.reasons:
        text = "This is not a valid submission:\n" + "".join(f"- {r}\n" for r in campaign.reasons)
        (root / f"{NOT_VALID.upper()}.txt").write_text(text, encoding="utf-8")
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return root, files


def check_root(root: Path) -> None:
    """Points of two campaigns must not mix."""
    if root.exists():
        raise BenchError(f"--submission-dir: {root} exists already; give another folder")


def _src_name(disclosure: Disclosure) -> str:
    return disclosure.src.resolve().name


def _write_point(
    folder: Path, campaign: CampaignFacts, point: MeasuredPoint, best_tps: float
) -> None:
    folder.mkdir(parents=True)
    share = point.result["system_tps"] / best_tps if best_tps else 0.0
    system = {
        **campaign.disclosure.system,
        "max_supported_concurrency": campaign.regions.c_max,
        "tps_utilization": round(share, 5),
    }
    for name, report in (("system_desc", system), ("result_summary", point.result)):
        text = json.dumps(report | campaign.mark, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    config = {
        "concurrency": point.concurrency,
        "duration_s": campaign.seconds(point),
        **campaign.config,
    }
    for name, report in (("point", point_yaml(campaign, point)), ("config", config)):
        (folder / f"{name}.yaml").write_text(to_yaml(report | campaign.mark), encoding="utf-8")
    if point.warmup_records:
        write_records(folder / WARMUP_LOG, list(point.warmup_records))


def point_yaml(campaign: CampaignFacts, point: MeasuredPoint) -> Fields:
    disclosure, regions = campaign.disclosure, campaign.regions
    return {
        "concurrency": point.concurrency,
        "region": regions.region_of(point.concurrency),
        "offline": "elected" if point.concurrency == regions.c_max else "none",
        "runtime_settings": {
            "load_pattern": "concurrency",
            "min_duration_ms": round(1000 * campaign.seconds(point)),
            "stream_all_chunks": True,
            "runtime": dict(disclosure.seeds),
        },
        "warmup": point.warmup,
        "division": disclosure.system["division"],
        "max_supported_concurrency": regions.c_max,
        "shared_src": f"src/{_src_name(disclosure)}",
        "shared_docs": "docs",
        **disclosure.point,
    }


def to_yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Mappings as blocks; all else as JSON, which YAML reads."""
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            lines.append(f"{indent}{key}:\n{to_yaml(item, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}\n")
    return "".join(lines)
