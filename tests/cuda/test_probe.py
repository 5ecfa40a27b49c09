"""The probe of benchmarks/gpu asks the fakes, so that it works when it meets a GPU."""

import pytest

from benchmarks.gpu import claims, probe
from tests.cuda import fake


def test_the_probe_finds_what_the_fakes_do(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "0")
    library, found = fake.library(), probe.build(str(tmp_path))
    answers = probe.execute(found, library.path, library.fake_cuda_client(), rounds=50)
    assert answers["in_place_of_8"] == 8
    assert answers["queued_of_16"] == 16
    assert 0 < answers["execute_us"] <= answers["execute_us_99th"]
    assert answers["execute_us_without_event"] > 0
    assert answers["until_end_is_known_us"] > answers["execute_us"]
    nbytes = 1 << 20
    array = fake.FakeArray((nbytes,), "uint8")
    answers = probe.copies(found, library.path, array.address, nbytes, rounds=3)
    assert all(value > 0 for value in answers.values())


@pytest.mark.drawn(every=2)
def test_a_check_that_fails_is_an_answer():
    found = probe.run_all(limit_seconds=60)
    assert set(found) == set(probe.CHECKS)
    assert found["nested"] == {"vertices": 1000, "equal": True}
    assert "failed" in found["execute"] or found["execute"]["in_place_of_8"] == 8
    told = claims.verdicts({"probe": found})
    for part in ("inside jax.jit", "direct calls go on", "calls under jax.jit", "pinned host"):
        (claim,) = [claim for claim in told if part in claim]
        assert told[claim] == "confirmed", claim
