import pytest
import torch

import bisam


@pytest.fixture(autouse=True)
def names_for_doctests(doctest_namespace):
    doctest_namespace.update(torch=torch, bisam=bisam)
