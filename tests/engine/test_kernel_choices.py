"""Kernels chosen by a stopwatch: the first engine of a kind chooses, all others follow."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tokenmill.engine import kernel_choices
from tokenmill.engine.kernel_choices import WAIT_S, KernelChoices, opened
from tokenmill.kernels import product_trials
from tokenmill.kernels.product_trials import by_lt, trials

FOUND = KernelChoices({"linear matmul_by_lt 8 6 5": True}, {8: 3, 32: 1})


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.naps = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


def test_the_first_of_a_kind_chooses_and_the_others_follow(tmp_path: Path) -> None:
    with opened(tmp_path, "H200") as first:
        assert first.known is None
        first.keep(FOUND)
    with opened(tmp_path, "H200") as second, opened(tmp_path, "H200") as third:
        assert second.known == third.known == FOUND, "who knows all keeps nobody waiting"
    with opened(tmp_path, "B200") as other:
        assert other.known is None


def test_who_starts_meanwhile_waits_for_what_is_found(tmp_path: Path) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.naps == 5:
            first.keep(FOUND)

    with opened(tmp_path, "H200") as first, opened(tmp_path, "H200", clock, sleep) as second:
        assert second.known == FOUND and clock.naps == 5


def test_a_file_system_without_locks_costs_the_choices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(kernel_choices.fcntl, "flock", flock)
    with opened(tmp_path, "H200") as first:
        first.keep(FOUND)
    with opened(tmp_path, "H200") as second:
        assert second.known == FOUND


def test_one_that_found_nothing_leaves_the_choice_to_the_next(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="capture"), opened(tmp_path, "H200"):
        raise RuntimeError("capture")
    clock = Clock()
    with opened(tmp_path, "H200", clock, clock.sleep) as second:
        assert second.known is None and not clock.naps


def test_nobody_waits_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with opened(tmp_path, "H200"), opened(tmp_path, "H200", clock, clock.sleep) as second:
        assert second.known is None and WAIT_S <= clock.now < WAIT_S + 1
    assert "another engine holds trials" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"products": {}, "most_prompts": {"x": 1}}'])
def test_a_file_that_says_nothing_is_written_anew(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, "H200") as first:
        first.path.write_text(text)
    with opened(tmp_path, "H200") as second:
        assert second.known is None and "chosen anew" in caplog.text
        second.keep(FOUND)
    with opened(tmp_path, "H200") as third:
        assert third.known == FOUND


def test_an_engine_starts_where_nothing_can_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with opened(tmp_path / "file" / "kernels", "H200") as first:
        assert first.known is None
        first.keep(FOUND)
    assert caplog.text.count("are not kept") == 2


def test_what_was_adopted_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_trials, "LEAST_BYTES", 6 * 5 * 4)
    monkeypatch.setattr(product_trials, "_second_is_faster", {})
    monkeypatch.setattr(product_trials, "_times", lambda *_: [1.0, 0.5])
    x, weight = torch.randn(8, 5), torch.randn(6, 5)
    with trials():
        assert by_lt(x, weight)
    found = product_trials.found()
    assert found == FOUND.products
    monkeypatch.setattr(product_trials, "_second_is_faster", {})
    product_trials.adopt(found)
    with trials(held=False):
        assert by_lt(x, weight) and not by_lt(torch.randn(7, 5), weight)
    assert product_trials.found() == found
