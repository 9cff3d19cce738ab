from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from sensitivity import device, machine

MiB = 1 << 20


@pytest.mark.parametrize(
    ("said", "visible", "size"),
    [
        ("81920\n", "", 81920 * MiB),
        ("1000\n2000\n", "1", 2000 * MiB),
        ("1000\n", "7", None),
        ("1000\n2000\n", "GPU-8a", 1000 * MiB),
        ("", "", None),
        ("No devices were found", "", None),
    ],
)
def test_a_gpus_memory_is_what_its_driver_says(said, visible, size, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.gpu_memory(lambda: said) == size


def test_the_budget_on_a_gpu_is_its_share_and_elsewhere_the_workers(monkeypatch):
    assert device.call_budget(5000, ask=lambda: "1000") == 5000
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert device.call_budget(5000, share=0.25, ask=lambda: "1000") == int(1000 * MiB * 0.25 * device.GPU_SHARE)
    assert device.call_budget(5000, ask=lambda: "") == 5000


def test_a_fraction_of_a_gpu_is_limited_and_a_whole_one_grows(monkeypatch):
    import tensorflow as tf

    done = []
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: done.append((gpu, on)))
    monkeypatch.setattr(
        tf.config, "set_logical_device_configuration", lambda gpu, parts: done.append((gpu, parts[0].memory_limit))
    )
    monkeypatch.setattr(device, "gpu_memory", lambda: 1000 * MiB)
    device._hold_gpu("gpu", 1.0)
    device._hold_gpu("gpu", 0.5)
    monkeypatch.setattr(device, "gpu_memory", lambda: None)
    device._hold_gpu("gpu", 0.5)
    assert done == [("gpu", True), ("gpu", int(500 * device.GPU_SHARE)), ("gpu", True)]


def test_kinds_tell_devices_apart():
    assert device.kind(1) != device.kind(2)
    assert machine.processor() in device.kind(1)


def test_a_span_has_its_own_peak_and_the_process_keeps_the_highest():
    before = machine.peak_memory()
    with machine.span() as peak:
        block = bytearray(80 * MiB)
        for page in range(0, len(block), 4096):
            block[page] = 1
        inside = peak()
        del block
    if inside is not None:
        assert inside >= 80 * MiB
        assert machine.peak_memory() >= max(before, inside) - MiB  # Linux counts pages in batches


def test_a_tensor_on_the_host_is_seen_and_not_copied():
    variable = tf.Variable([1.0, 2.0])
    seen = device.on_host(variable.read_value())
    assert not seen.flags.writeable
    assert not seen.flags.owndata
    variable.assign([5.0, 6.0])
    np.testing.assert_array_equal(seen, [1.0, 2.0])
    np.testing.assert_array_equal(device.on_host(tf.ones(2, "bfloat16")).astype("float32"), [1.0, 1.0])
