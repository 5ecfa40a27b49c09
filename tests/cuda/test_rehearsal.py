"""The first visit to a GPU, rehearsed: benchmarks/gpu/run.py end to end on the fakes, and how it
goes on after one that ended early."""

import json

import pytest

from benchmarks.gpu import claims, run
from tests import drawing
from tests.cuda import fake

SECTIONS = ["rates", "launch", "llama", "host", "order", "rows", "long"]
ALONE = [frozenset({name}) for name in SECTIONS]
pytestmark = [pytest.mark.plain_runs, pytest.mark.optimized]


@pytest.fixture(scope="module")
def visit(tmp_path_factory, pytestconfig):
    """What one visit finds, its sections drawn as cases of tests are, and its folder."""
    count = 3 if drawing.draws(pytestconfig) else None
    sections = [SECTIONS[i] for i in drawing.drawn("visit", ALONE, count, drawing.day())]
    folder = tmp_path_factory.mktemp("visit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXOFFLOAD_CACHE", str(folder / "kept"))
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        found = run.main(
            ["--small", "--rehearse", "--only", ",".join(sections), "--out", str(folder)]
        )
    assert list(found["sections"]) == sections
    return found, folder


def test_every_section_ends_on_the_imitated_gpu(visit):
    found, folder = visit
    assert found["machine"]["device"] == "imitated"
    assert not {n: s for n, s in found["sections"].items() if "failed" in s}
    if llama := found["sections"].get("llama"):
        rows = [row for row in llama.values() if isinstance(row, dict)]
        ours = [row for case in rows for key, row in case.items() if key.isdigit()]
        assert ours and all(row["bytes_reloaded"] > 0 == row["copied_outputs"] for row in ours)
    if host := found["sections"].get("host"):
        assert host["always"]["on_host"] > 0 == host["never"]["on_host"]
        assert all(host[way]["copied_outputs"] == 0 for way in ("never", "always", "auto"))
    if long := found["sections"].get("long"):
        free = long["before"]["free_device_bytes"]
        assert 0.9 * fake.BYTES < free <= fake.BYTES, "it ran somewhere else"
    assert found == json.loads((folder / "gpu.json").read_text())


def test_claims_are_told(visit):
    found, folder = visit
    said = found["claims"]
    told = {True: "confirmed", False: "open"}
    in_place, behind = "no output is copied into its place (LLaMA)", "minutes of steps leave"
    assert said[in_place] == told["llama" in found["sections"]]
    assert said[f"{behind} nothing behind"] == told["long" in found["sections"]]
    assert said["tests/cuda/test_gpu.py passes"] == "open", "it was left out"
    text = (folder / "gpu.md").read_text()
    assert f"- {said[in_place]}: {in_place}" in text
    if llama := found["sections"].get("llama"):
        cases = {k: v for k, v in llama.items() if k != "link"}
        assert cases and all(row["jax_host_offload"]["seconds"] > 0 for row in cases.values())
        assert all(case in text for case in cases) and "of bound" in text


def test_a_visit_goes_on_where_one_ended(visit, monkeypatch, tmp_path):
    found, folder = visit
    sections = dict.fromkeys(SECTIONS, {"found": 1}) | found["sections"]
    sections["launch"] = {"failed": "no end in 540 s"}
    (tmp_path / "gpu.json").write_text(json.dumps(dict(found, sections=sections)))
    asked = []

    def answer(arguments, limit_seconds):
        asked.append(arguments[arguments.index("--section") + 1])
        return {"compute_idle_share": 0.5}

    monkeypatch.setattr(run, "_in_process", answer)
    again = run.main(
        ["--small", "--rehearse", "--only", ",".join(SECTIONS), "--out", str(tmp_path)]
    )
    assert asked == ["launch"], "the others did not fail"
    assert again["sections"] == sections | {"launch": {"compute_idle_share": 0.5}}
    idle = next(claim for claim in claims.CLAIMS if "idles" in claim)
    assert again["claims"][idle] == "refuted"
    # Of another device nothing is taken.
    other = dict(again, machine=dict(again["machine"], device="another"))
    (tmp_path / "gpu.json").write_text(json.dumps(other))
    run.main(["--small", "--rehearse", "--only", "launch,long", "--out", str(tmp_path)])
    assert asked == ["launch", "launch", "long"]


def test_every_section_has_a_limit_of_its_own(monkeypatch):
    limits = {}
    monkeypatch.setattr(run, "_in_process", lambda a, limit: limits.setdefault(a[3], limit) and {})
    run.main(["--small"])
    assert limits == {name: run.LIMITS.get(name, run.LIMIT_SECONDS) for name in run.SECTIONS}
