"""Checks of the sampling kernels against their references, by name and for a device."""

import math
from itertools import product

import torch

from tokenmill.kernels import sampling
from tokenmill.kernels.gpu import sampling as gpu_sampling
from tokenmill.kernels.sampling import Biases, Filters, Masks, Penalties

DTYPES = (torch.float32, torch.bfloat16)  # bf16 makes ties


def _logits(rows: int, vocab: int, dtype: torch.dtype, device: str, spread: float = 3.0):
    return (spread * torch.randn(rows, vocab)).to(device, dtype)


def check_argmax(device: str) -> None:
    for rows, vocab, dtype in product((1, 3), (1, 50, 4096, 9000), DTYPES):
        logits = _logits(rows, vocab, dtype, device)
        expected = logits.float().argmax(-1).int()
        assert torch.equal(gpu_sampling.argmax(logits), expected)
        assert torch.equal(sampling.argmax.reference(logits), expected)
    logits = torch.zeros(2, 10_000, device=device)
    logits[0, [700, 701, 9000]] = 5.0
    logits[1, [5000, 9999]] = 5.0
    assert gpu_sampling.argmax(logits).tolist() == [700, 5000]
    logits[0, 5000], logits[1] = -0.0, -0.0
    logits[1, 4097] = 0.0  # equal to -0.0
    assert gpu_sampling.argmax(logits).tolist() == [700, 0]


def check_not_finite(device: str) -> None:
    """NaN of either sign, inf and rows without any number, in any place."""
    logits = torch.randn(6, 5000, device=device)
    for row, value in enumerate((math.nan, -math.nan, math.inf)):
        logits[row, row * 2400] = value
    logits[3] = -math.inf
    logits[4, 17] = -math.inf
    filters = _filters([(1.0, 0.0, 0, 1.0), *[(1.0, 0.1, 20, 0.9)] * 5], device)
    numbers = torch.rand(6, dtype=torch.float64, device=device)
    for best in (gpu_sampling.argmax, sampling.argmax.reference):
        assert (best(logits) < 0).tolist() == [True, True, True, True, False, False]
    for draw in (gpu_sampling.sample, sampling.sample.reference):
        bad = draw(logits, filters, numbers) < 0
        assert bad.tolist() == [True, True, True, True, False, False]


def _filters(rows: list[tuple[float, float, int, float]], device: str) -> Filters:
    temperature, min_p, top_k, top_p = zip(*rows, strict=True)
    return Filters(
        torch.tensor(temperature, dtype=torch.float64, device=device),
        torch.tensor(min_p, dtype=torch.float64, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float64, device=device),
    )


ROWS = [
    (0.0, 0.0, 0, 1.0),
    (0.0, 0.1, 5, 0.5),
    (1.0, 0.0, 0, 1.0),
    (50.0, 0.0, 0, 1.0),
    (0.4, 0.0, 0, 0.9),
    (1.0, 0.02, 0, 1.0),
    (1.0, 0.0, 40, 1.0),
    (1.0, 0.0, 10**6, 1.0),
    (2.0, 0.001, 40, 0.9),
    (50.0, 0.5, 0, 0.95),
]
SHAPES = ((37, torch.bfloat16, 3.0), (5000, torch.float32, 0.001), (9000, torch.bfloat16, 3.0))


def check_sample(device: str) -> None:
    for vocab, dtype, spread in SHAPES:
        logits = _logits(len(ROWS), vocab, dtype, device, spread)
        numbers = torch.rand(len(ROWS), dtype=torch.float64, device=device)
        filters = _filters(ROWS, device)
        found = gpu_sampling.sample(logits, filters, numbers)
        expected = sampling.sample.reference(logits, filters, numbers)
        _agree(found, expected, logits, filters, numbers)
        alone = gpu_sampling.sample(logits[5:6], Filters(*(f[5:6] for f in filters)), numbers[5:6])
        assert alone.item() == found[5].item()


def _agree(
    found: torch.Tensor,
    expected: torch.Tensor,
    logits: torch.Tensor,
    filters: Filters,
    numbers: torch.Tensor,
) -> None:
    """Equal tokens, or, where exp rounds otherwise, the two sides of an edge of the CDF."""
    for row in (found != expected).nonzero().flatten().tolist():
        scores = logits[row].double() / filters.temperature[row]
        sums = scores.softmax(-1).cumsum(-1)
        is_filtered = bool(filters.top_p[row] < 1) or 0 < int(filters.top_k[row]) < scores.numel()
        first, second = sorted((int(found[row]), int(expected[row])))
        assert not is_filtered and filters.min_p[row] == 0, (row, first, second)
        assert abs(float(sums[first] - numbers[row])) < 1e-6
        assert float(sums[second - 1] - sums[first]) < 1e-6
    assert (found != expected).sum() <= 1


def check_ties(device: str) -> None:
    """Equal logits are kept or dropped together, wherever the chunks' borders are."""
    logits = torch.full((6, 9000), -5.0, device=device)
    logits[:, [10, 4500, 8999]] = 3.0
    logits[:, [11, 5000]] = 2.0
    share = 3 / (3 + 2 / math.e)
    options = [(1.0, 0.0, 1, 1.0), (1.0, 0.0, 4, 1.0), (1.0, 1.0, 0, 1.0), (1.0, 0.5, 5, 1.0)]
    options += [(0.5, 0.0, 0, 0.01), (1.0, 0.0, 5, share + 0.01)]
    filters = _filters(options, device)
    kept = [{10, 4500, 8999}, {10, 11, 4500, 5000, 8999}] + [{10, 4500, 8999}] * 3
    kept.append({10, 11, 4500, 5000, 8999})
    drawn: list[set[int]] = [set() for _ in kept]
    for number in (0.1, 0.3, 0.5, 0.7, 0.9):
        numbers = torch.full((6,), number, dtype=torch.float64, device=device)
        for row, token in enumerate(gpu_sampling.sample(logits, filters, numbers).tolist()):
            drawn[row].add(token)
    assert drawn == kept


def check_capacity(device: str) -> None:
    """More values near the best than are collected, and fewer than top_k or top_p need."""
    capacity = gpu_sampling.CAPACITY
    many = 0.1 * torch.randn(3, capacity + 5000, device=device)
    few = torch.full((3, 9000), -30.0, device=device) + torch.rand(3, 9000, device=device)
    few[:, 4000] = 0.0
    numbers = torch.tensor([0.3, 0.999999, 0.7], dtype=torch.float64, device=device)
    filters = _filters([(1.0, 0.0, 30, 1.0), (1.0, 0.0, 0, 0.7), (1.0, 0.0, 500, 0.5)], device)
    expected = sampling.sample.reference(many, filters, numbers)
    assert torch.equal(gpu_sampling.sample(many, filters, numbers), expected)
    numbers[:] = 1 - 2**-48
    filters = _filters([(1.0, 0.0, 30, 1.0), (1.0, 0.0, 0, 1 - 1e-10), (1.0, 0.0, 0, 0.5)], device)
    expected = sampling.sample.reference(few, filters, numbers)
    assert torch.equal(gpu_sampling.sample(few, filters, numbers), expected)
    assert expected[0] != 4000 and expected[1] != 4000 and expected[2] == 4000


def check_adjust(device: str) -> None:
    vocab, lengths = 3000, [0, 5, 1500, 1, 0, 2]
    ids = [torch.randperm(vocab)[:n] for n in lengths]
    last = [7, int(ids[1][3]), int(ids[2][1200]), (int(ids[3][0]) + 1) % vocab, 9, -1]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    floats = {"dtype": torch.float32, "device": device}
    ints = {"dtype": torch.int32, "device": device}
    penalties = Penalties(
        offsets.to(**ints),
        torch.cat(ids).to(**ints),
        torch.randint(0, 4, (sum(lengths),)).to(**floats),
        torch.tensor([1.0, 1.3, 0.7, 2.0, 1.5, 1.5], **floats),
        torch.tensor([0.5, 0.3, -0.4, 0.0, 0.2, 0.1], **floats),
        torch.tensor([0.5, 0.0, 0.7, -1.0, 0.1, 0.1], **floats),
        torch.tensor(last, **ints),
        torch.tensor([0, 1, 1, 1, 1, 1], **ints),
    )
    values = torch.randn(sum(lengths)).to(device)
    values[2] = -math.inf
    biases = Biases(offsets.to(**ints), torch.cat(ids).to(**ints), values)
    for dtype in DTYPES:
        logits = _logits(len(lengths), vocab, dtype, device)
        for p, b in ((penalties, None), (None, biases), (penalties, biases)):
            expected = sampling.adjust.reference(logits, p, b)
            found = logits.to(torch.float32, copy=True)
            if p is not None:
                gpu_sampling.penalise(found, p)
            if b is not None:
                gpu_sampling.add_biases(found, b)
            assert torch.equal(found, expected)
            assert not torch.equal(expected, logits.float())


def check_masks(device: str) -> None:
    """Words whose every bit is drawn, of some rows, over a vocabulary that ends inside a word."""
    numbers = [1, -1, -1, 2, -1, 0]
    for vocab, dtype in product((1, 33, 4096, 9001), DTYPES):
        logits = _logits(6, vocab, dtype, device)
        words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int32)
        words[1] = 0
        words[2, 1:] = -1
        expected = logits.cpu()
        for row, number in enumerate(numbers):
            for token in range(vocab if number >= 0 else 0):
                if not int(words[number, token // 32]) >> token % 32 & 1:
                    expected[row, token] = -math.inf
        masks = Masks(torch.tensor(numbers, dtype=torch.int32, device=device), words.to(device))
        apart = torch.zeros(6, vocab + 9, dtype=dtype, device=device)[:, 5:-4]
        apart.copy_(logits)  # rows that do not lie one behind the other
        for mask in (gpu_sampling.masked, sampling.masked.reference):
            for given in (logits, apart):
                assert torch.equal(mask(given, masks).cpu(), expected)
            assert torch.equal(logits, apart)


CHECKS = {
    "argmax": check_argmax,
    "not_finite": check_not_finite,
    "sample": check_sample,
    "ties": check_ties,
    "capacity": check_capacity,
    "adjust": check_adjust,
    "masks": check_masks,
}
