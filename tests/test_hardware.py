"""Where a model is trained: what cannot be had is refused before anything starts."""

import pytest
import torch
from toys import small_config

from bert4rec.training.hardware import bf16_times_faster, choose_hardware


def test_float32_on_the_cpu_is_the_default_without_a_gpu() -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU")
    hardware = choose_hardware(small_config().training)
    assert str(hardware) == "cpu, float32"


def test_a_device_that_is_not_there_is_refused() -> None:
    for device in ("cuda", "mps"):
        if not getattr(torch, device).is_available():
            with pytest.raises(ValueError, match=f"training.device = '{device}'.*device=cpu"):
                choose_hardware(small_config(f"device={device}").training)


@pytest.mark.parametrize(
    ("times_faster", "complaint"),
    [(None, "kills the process"), (0.25, "4.0 times slower"), (2.0, "ONEDNN_MAX_CPU_ISA")],
)
def test_bf16_is_refused_where_it_crashes_or_is_slow_or_is_not_capped(
    times_faster: float | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    settings = small_config("device=cpu", "precision=bf16").training
    with pytest.raises(ValueError, match=complaint):
        choose_hardware(settings, lambda: times_faster)


def test_bf16_is_used_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    settings = small_config("device=cpu", "precision=bf16").training
    hardware = choose_hardware(settings, lambda: 2.0)
    assert hardware.uses_bf16
    with hardware.autocast():
        assert torch.is_autocast_enabled("cpu")


def test_the_probe_of_bf16_survives_whatever_happens() -> None:
    times_faster = bf16_times_faster()
    assert times_faster is None or times_faster > 0
