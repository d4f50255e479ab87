import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from engine import tiny_gemma_model, tiny_model

pytest_plugins = ["service_fixtures"]


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(model_cache):
    """The tiny random Llama in fp32, shared by all tests: its weights are frozen."""
    torch.set_num_threads(1)
    return tiny_model(model_cache)


@pytest.fixture(scope="session")
def tiny_gemma(tiny, tmp_path_factory):
    """A random Gemma with the tiny Llama's tokenizer: its decoder is transformers' module."""
    return tiny_gemma_model(tiny, tmp_path_factory.mktemp("gemma"))
