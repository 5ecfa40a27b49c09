"""GPUs for which XLA's compiler can compile although they are not there.

Takes a name; gives a `Target`: the description that the compiler wants in place of a device, as the
text of a GpuTargetConfigProto (xla/stream_executor/device_description.proto). Figures and their
sources are in gpus/*.toml; a file with such a text, written where the GPU is, serves as well
(`from_text`).
"""

import dataclasses
import functools
import pathlib
import re
import tomllib

FOLDER = pathlib.Path(__file__).parent / "gpus"
ENDING = ".txtpb"
"""Of files with a proto's text."""
_CUDNN = 9, 12
"""What JAX asks for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A GPU, as its compiler sees it.

    Attributes:
      name: as in `Machine.gpu`.
      architecture: "sm_90a".
      text: of the proto, without the version of CUDA.
      cuda: major versions of CUDA whose compiler has the architecture; empty where that is not
        known.
      sources: where the figures are from.
    """

    name: str
    architecture: str
    text: str
    cuda: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def described(self, cuda: int) -> str:
        """The proto's text for a compiler of some major version of CUDA."""
        return f"{self.text}runtime_version {{ major: {cuda} }}\n"


@functools.cache
def known() -> dict[str, Target]:
    """The targets that come with the package, by name."""
    found = map(_read, sorted(FOLDER.glob("*.toml")))
    return {target.name: target for target in found}


def find(name: str) -> Target:
    """The target of a name, or of a file.

    Raises:
      ValueError: it is not known; lists those that are. OSError: the file cannot be read.
    """
    if name in known():
        return known()[name]
    if name.endswith(ENDING):
        return from_text(pathlib.Path(name).read_text(), name)
    raise ValueError(
        f"gpu={name!r} is not known. Pass one of {', '.join(map(repr, known()))}, or a file "
        f"*{ENDING} that jaxoffload doctor --save-target has written."
    )


def from_text(text: str, name: str) -> Target:
    """A target of the text of a whole proto, as `jaxoffload doctor --save-target` writes it.

    Raises:
      ValueError: it describes no compute capability.
    """
    found = re.search(r"cuda_compute_capability\s*\{([^}]*)\}", text)
    major = re.search(r"major:\s*(\d+)", found[1]) if found else None
    if found is None or major is None:
        raise ValueError(
            f"{name} describes no GPU of NVIDIA: it has no cuda_compute_capability. Write it with "
            "jaxoffload doctor --save-target=FILE, where the GPU is."
        )
    minor = re.search(r"minor:\s*(\d+)", found[1])
    suffix = "a" if "ACCELERATED_FEATURES" in found[1] else ""
    architecture = f"sm_{major[1]}{minor[1] if minor else 0}{suffix}"
    text = re.sub(r"^runtime_version\s*\{[^}]*\}\n?", "", text, flags=re.MULTILINE)
    return Target(name, architecture, text.rstrip() + "\n")


def _read(path: pathlib.Path) -> Target:
    with path.open("rb") as file:
        found = tomllib.load(file)
    major, minor = found["compute_capability"]
    capability = f"major: {major} minor: {minor}"
    if found["accelerated"]:
        capability += " feature_extension: ACCELERATED_FEATURES"
    lines = [f"  {field}: {value}" for field, value in found["device"].items()]
    lines = [
        "gpu_device_info {",
        *lines,
        f"  cuda_compute_capability {{ {capability} }}",
        "}",
        'platform_name: "CUDA"',
        f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}",
        f'device_description_str: "{found["kind"]}"',
        "",
    ]
    return Target(
        found["name"],
        f"sm_{major}{minor}{'a' if found['accelerated'] else ''}",
        "\n".join(lines),
        tuple(found["cuda"]),
        tuple(found["sources"]),
    )
