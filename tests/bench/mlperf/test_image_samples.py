"""Samples of Qwen3-VL's benchmark: sizes, prompts that an engine takes, scores, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import tokenmill.bench
from tokenmill.bench.commands import mlperf
from tokenmill.bench.commands.mlperf import PANELS
from tokenmill.bench.mlperf.accuracy import category_f1
from tokenmill.bench.mlperf.presets import QWEN3_VL
from tokenmill.bench.mlperf.runs import MlperfRun
from tokenmill.bench.mlperf.samples import SampleSize, draw_sizes, image_samples
from tokenmill.bench.workload import BenchError
from tokenmill.core.requests import Generate, Request
from tokenmill.core.specs.vision import image_problem
from tokenmill.models import spec_of
from tokenmill.settings import Settings, SettingsError, defaults_of

TABLE = defaults_of(*PANELS.values())

SHAPE = Path(tokenmill.bench.__path__[0]) / "shapes" / "qwen3-vl-235b-a22b.json"
RUN = MlperfRun(QWEN3_VL, "Offline", 1.0)


@pytest.mark.parametrize("name", ["v6.0", "v6.1"])
def test_sizes_are_those_that_are_known_of_the_benchmark(name: str) -> None:
    shapes, scale = draw_sizes(replace(RUN, round=name), 2**17)
    assert scale == 1 and len(shapes) == 48_289
    assert mean(shape.text for shape in shapes) == pytest.approx(800, rel=0.02)
    assert mean(s.rows * s.columns for s in shapes) == pytest.approx(1400, rel=0.03)
    assert mean(shape.output for shape in shapes) == pytest.approx(43, rel=0.02)
    assert max(shape.output for shape in shapes) == 150
    with pytest.raises(BenchError, match="--quick scales the lengths down"):
        draw_sizes(RUN, 4096)


def test_an_engine_takes_the_samples_however_short_its_context() -> None:
    spec = spec_of(json.loads(SHAPE.read_text()))
    shapes, scale = draw_sizes(replace(RUN, quick_samples=4), 300)
    assert scale < 1
    for shape, sample in zip(shapes, image_samples(RUN, shapes, spec), strict=True):
        ids = sample.prompt_token_ids.tolist()
        assert len(ids) == shape.num_input and len(ids) + (sample.sampling.max_tokens or 0) <= 300
        assert sample.images is not None
        images = sample.images()
        assert image_problem(Request("a", Generate(ids, images=images)), spec.vision) is None
        assert images[0].num_tokens == shape.rows * shape.columns == ids.count(151_655)
        assert images == sample.images()  # the same sample has the same image


def test_a_model_without_an_encoder_is_refused() -> None:
    spec = replace(spec_of(json.loads(SHAPE.read_text())), vision=None)
    with pytest.raises(BenchError, match="takes text alone: --model must be a Qwen3-VL"):
        image_samples(RUN, [SampleSize(5, 2, 2, 3)], spec)


def test_categories_count_level_by_level() -> None:
    def answer(category: str, **changed: object) -> str:
        fields = {"category": category, "brand": "x", "is_secondhand": False}
        return json.dumps(fields | changed)

    targets = ["A > B > C", "A > B", "A > B > C", "A > B"]
    answers = [answer("A > B > D"), answer("X > B"), "not JSON", answer("A", is_secondhand="no")]
    # 2 of 3 right, 0 of 2, then 3 and 2 levels that are wrong: 2 right, 10 said, 10 wanted.
    assert category_f1(answers, targets) == 20.0
    assert category_f1([answer("A > B > C > D")], ["A > B > C"]) == pytest.approx(85.7143)
    assert category_f1([answer("A>B")], ["A > B"]) == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"scenario": "Interactive"},
            "qwen3-vl-235b has Offline and Server only",
        ),
        ({"scenario": "SingleStream"}, "--scenario SingleStream: .* has Offline and Server only"),
        ({"url": "http://127.0.0.1:1/v1"}, "runs on an engine of this process"),
        ({"compliance": True}, "--compliance: qwen3-vl-235b has no compliance tests here"),
        ({"test-mode": "TEST06"}, "not a test of qwen3-vl-235b: it has no compliance tests here"),
    ],
)
def test_what_does_not_run_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        mlperf.run_of(Settings({"benchmark": "qwen3-vl-235b", "quick": True} | given, TABLE))
