import pytest
import torch


@pytest.fixture(autouse=True)
def names_for_doctests(doctest_namespace):
    doctest_namespace["torch"] = torch
