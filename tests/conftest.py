import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from importlib.util import find_spec

if find_spec("triton") is not None:
    import interpreter  # noqa: F401  before torch's compiler, which PEFT and transformers import, imports Triton

import pytest
import torch
from engine import tiny_gemma_model, tiny_model

from marlaas_kernels import registry

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


@pytest.fixture(scope="module")
def interpreted():
    """Kernels run in Triton's interpreter; for modules that import `interpreter`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture
def kernels_everywhere(interpreted, monkeypatch):
    """Batches on a CPU are computed by the Triton kernels too, in the interpreter; the list grows with each batch."""
    batches = []

    def counted(device_type, longest_segment):
        batches.append(longest_segment)
        return registry.triton_kernels(device_type, longest_segment)

    monkeypatch.setitem(registry.KERNELS, "cpu", counted)
    return batches
