import pytest

from marlaas.sampling import cpu_passes, native


@pytest.fixture(params=["one call", "blocks", "torch"])
def every_path(request, monkeypatch):
    """Passes in one compiled call, in compiled pieces between torch's products, and in torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(native, "cpu_passes", lambda *given: None)
    monkeypatch.setattr(cpu_passes, "_SMALL", 10**9 if request.param == "one call" else 0)
