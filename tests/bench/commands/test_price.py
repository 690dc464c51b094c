"""The price of a bare figure."""

from __future__ import annotations

import json

import pytest

from tokenmill.__main__ import run

pytestmark = pytest.mark.usefixtures("clean_folder")
FLAGS = {"--tok-s": "250634", "--gpus": "72", "--price-per-gpu-hour": "3.76"}


def price(**changed: str | None) -> int:
    given = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    flags = [part for name, value in given.items() if value is not None for part in (name, value)]
    return run(["bench", "price", *flags])


def test_a_published_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """72 GPUs cost 270.72 dollars an hour, in which they give 902.2824 million tokens."""
    assert price() == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "$0.30 per million output tokens"
    report = json.loads(out[-1])
    assert report["usd_per_million_output"] == pytest.approx(270.72 / 902.2824, abs=1e-5)
    assert report["output_tok_s_gpu"] == pytest.approx(250634 / 72, abs=1e-4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tok_s": None}, "--tok-s is missing: Output tokens per second"),
        ({"gpus": None}, "--gpus is missing"),
        ({"price_per_gpu_hour": None}, "--price-per-gpu-hour is missing"),
        ({"tok_s": "0"}, "--tok-s must be above 0, got 0"),
        ({"tok_s": "-3"}, "--tok-s must be a number of at least 0, got '-3'"),
        ({"gpus": "0"}, "--gpus must be a whole number of at least 1, got '0'"),
        ({"price_per_gpu_hour": "x"}, "--price-per-gpu-hour must be a number of at least 0"),
    ],
)
def test_wrong_input(
    changed: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert price(**changed) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
