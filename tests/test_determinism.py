"""The same bits on every run, in every batch, with any number of threads."""

import pytest
import torch
from cases import RECIPES, Shape, make_case
from contract import assert_same_bits

pytestmark = pytest.mark.parametrize("recipe", RECIPES)
SHAPE = Shape(2, 4, 2, 130, 200, 64, causal=True)


def everything(case, recipe):
    saved = case.forward(recipe)
    return *saved, *case.backward(recipe, saved)


def assert_all_same(got, want):
    for x, y in zip(got, want):
        assert_same_bits(x, y)


def test_twenty_runs(recipe, device):
    case = make_case(SHAPE, device)
    want = everything(case, recipe)
    for _ in range(20):
        assert_all_same(everything(case, recipe), want)


@pytest.mark.parametrize("kind", ["random", "outlier"])
def test_an_entry_of_a_batch_is_that_entry_alone(kind, recipe, device):
    case = make_case(Shape(4, 2, 2, 70, 100, 64), device, kind=kind)
    whole = everything(case, recipe)
    for b in range(4):
        alone = everything(case.map(lambda x: x[b : b + 1]), recipe)
        assert_all_same([x[b : b + 1] for x in whole], alone)


def test_a_head_is_that_head_alone(recipe, device):
    case = make_case(Shape(1, 3, 3, 70, 100, 64), device)
    whole = everything(case, recipe)
    for h in range(3):
        alone = everything(case.map(lambda x: x[:, h : h + 1]), recipe)
        assert_all_same([x[:, h : h + 1] for x in whole], alone)


def test_deterministic_mode_changes_nothing(recipe, device):
    """It also fills new memory with NaN, which no output may keep."""
    case = make_case(SHAPE, device)
    want = everything(case, recipe)
    torch.use_deterministic_algorithms(True)
    try:
        got = everything(case, recipe)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_all_same(got, want)


@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 1, 1, 300, 300, 128)], ids=str)
def test_number_of_threads(shape, recipe, device):
    case = make_case(shape, device)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(everything(case, recipe))
    finally:
        torch.set_num_threads(threads)
    for got in results[1:]:
        assert_all_same(got, results[0])
