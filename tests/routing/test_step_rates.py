"""Rates are found from steps, whatever the machine; the prior holds where nothing was measured."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from tokenmill.routing.step_rates import PRIOR, StepRates, StepSums, fit_rates

GPU = StepRates(base=6.0, mixed=16.0, prefill=0.015, sequence=0.01, kv=5e-5)
CPU = StepRates(base=10.0, mixed=3.0, prefill=1.0, sequence=2.0, kv=8e-4)


def steps(rates: StepRates, count: int, noise: float = 0.0) -> StepSums:
    source, sums = random.Random(3), StepSums()
    for _ in range(count):
        num_prefill = source.choice((0, 0, source.randrange(1, 500)))
        num_decodes = source.randrange(1, 30)
        num_kv = num_decodes * source.randrange(100, 2000)
        time_ms = rates.base + rates.prefill * num_prefill + rates.sequence * num_decodes
        time_ms += rates.kv * num_kv + (rates.mixed if num_prefill else 0.0)
        sums.add(num_prefill, num_decodes, num_kv, time_ms * source.uniform(1 - noise, 1 + noise))
    return sums


def test_nothing_measured_is_the_prior() -> None:
    assert astuple(fit_rates(StepSums().values)) == pytest.approx(astuple(PRIOR))


@pytest.mark.parametrize("rates", [GPU, CPU])
def test_rates_are_found(rates: StepRates) -> None:
    assert astuple(fit_rates(steps(rates, 400).values)) == pytest.approx(astuple(rates), rel=0.05)
    noisy = fit_rates(steps(rates, 3000, noise=0.3).values)
    assert noisy.prefill == pytest.approx(rates.prefill, rel=0.2)
    assert noisy.base == pytest.approx(rates.base, rel=0.2)


def test_sums_of_two_workers_are_added() -> None:
    one, two = steps(CPU, 200).values, steps(CPU, 300).values
    both = fit_rates([a + b for a, b in zip(one, two, strict=True)])
    assert both.prefill == pytest.approx(CPU.prefill, rel=0.05)


def test_no_rate_is_negative_and_a_cached_token_is_never_worthless() -> None:
    sums = StepSums()
    for number in range(200):  # the time has nothing to do with what is computed
        sums.add(number % 7, 1 + number % 5, 16 * number, 0.1)
    rates = fit_rates(sums.values)
    assert min(astuple(rates)) >= 0.0 < rates.prefill
