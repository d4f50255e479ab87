"""Which kernels a device gets."""

import sys

import pytest
import torch

from marlaas_kernels import registry


@pytest.fixture
def asked_anew():
    registry._triton_is_installed.cache_clear()
    yield
    registry._triton_is_installed.cache_clear()


@pytest.mark.parametrize("device", ["cpu", "meta", "xpu"])
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_other_devices_have_no_such_kernels_whatever_the_environment_says(device, interpret, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert registry.table_kernels(torch.device(device), 100) is None


@pytest.mark.parametrize(("device", "package"), [("cuda", "marlaas[triton]"), ("npu", "triton-ascend")])
def test_without_triton_torch_computes_and_one_warning_says_what_to_install(
    device, package, monkeypatch, caplog, asked_anew
):
    monkeypatch.setitem(sys.modules, "triton", None)
    for _ in range(2):
        assert registry.triton_kernels(device, 1) is None
    assert len(caplog.records) == 1
    assert f"pip install '{package}'" in caplog.text


def test_accelerators_get_tiles_by_the_longest_segment(asked_anew):
    pytest.importorskip("interpreter")
    short, longer = (registry.table_kernels(torch.device("cuda"), tokens) for tokens in (16, 17))
    assert (short.block_tokens, longer.block_tokens) == (16, 64)
