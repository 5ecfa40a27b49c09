"""Descriptions of GPUs: complete, with their sources, and the same when they come from a file."""

import dataclasses
import re

import pytest

from jaxoffload.compile import gpu_targets
from jaxoffload.plan.cost.machines import MACHINES

FIELDS = {
    "block_dim_limit_x block_dim_limit_y block_dim_limit_z clock_rate_ghz core_count "
    "device_memory_size fpus_per_core l2_cache_size memory_bandwidth registers_per_block_limit "
    "registers_per_core_limit shared_memory_per_block shared_memory_per_block_optin "
    "shared_memory_per_core threads_per_block_limit threads_per_core_limit threads_per_warp"
}


@pytest.mark.parametrize("name", gpu_targets.known())
def test_every_target_is_complete(name):
    target = gpu_targets.find(name)
    device = target.text.partition("cuda_compute_capability")[0]
    fields = dict(re.findall(r"^  (\w+): ([\d.]+)$", device, re.MULTILINE))
    assert {" ".join(sorted(fields))} == FIELDS and all(map(float, fields.values()))
    assert target.sources and target.cuda
    assert float(fields["shared_memory_per_block_optin"]) <= float(fields["shared_memory_per_core"])
    assert re.fullmatch(r"sm_\d+a?", target.architecture)


@pytest.mark.parametrize("name", [n for n, m in MACHINES.items() if m.gpu])
def test_machines_agree_with_the_descriptions_of_their_gpus(name):
    machine = MACHINES[name]
    text = gpu_targets.find(machine.gpu).text
    bandwidth, memory = (
        float(re.search(rf"{field}: ([\d.]+)", text)[1])
        for field in ("memory_bandwidth", "device_memory_size")
    )
    assert machine.memory_bytes_per_second == pytest.approx(bandwidth, rel=0.01)
    assert machine.device_bytes == pytest.approx(memory, rel=0.08)


def test_every_gpu_is_the_device_of_a_machine():
    assert {m.gpu for m in MACHINES.values()} - {""} == set(gpu_targets.known())


def test_a_file_of_the_text_is_the_same_target(tmp_path):
    for target in gpu_targets.known().values():
        path = tmp_path / "mine.txtpb"
        path.write_text(target.described(13))
        found = gpu_targets.find(str(path))
        assert found.text == target.text and found.architecture == target.architecture
        assert dataclasses.replace(found, name=target.name).described(12) == target.described(12)


def test_what_is_not_known_is_refused_with_what_is(tmp_path):
    with pytest.raises(ValueError, match="'H300' is not known. Pass one of .*'H200'"):
        gpu_targets.find("H300")
    path = tmp_path / "amd.txtpb"
    path.write_text("gpu_device_info { rocm_compute_capability { } }")
    with pytest.raises(ValueError, match="no cuda_compute_capability"):
        gpu_targets.find(str(path))
