"""From a kernel to an executable: by the plugin that we load, or by JAX on its own client."""

import hashlib
from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.kernel import Kernel
from jaxoffload.compile.lower import lower, portable


class PluginCompiler:
    """Compiles portable StableHLO on a client of a plugin that JAX does not know.

    Args:
      client: has `compile(code, options)` and `attributes`.
      options: serialized compile options.
    """

    def __init__(self, client: Any, options: bytes):
        self._client, self._options = client, options
        self._version = stablehlo_version(client.attributes)

    def lower(self, kernel: Kernel) -> tuple[bytes, Any]:
        """What tells the kernel's program from others, and what `compile` takes."""
        code = portable(lower(kernel, "cpu"), self._version)
        return hashlib.sha256(code).digest(), code

    def compile(self, code: Any) -> Any:
        """The executable. Any thread."""
        return self._client.compile(code, self._options)


class JaxCompiler:
    """Has JAX compile, with its own options and caches, on the client that the runtime shares.

    Args:
      client: the native client, which adopts executables.
      device: where vertices run.
    """

    def __init__(self, client: Any, device: Any):
        self._client, self._device = client, device

    def lower(self, kernel: Kernel) -> tuple[bytes, Any]:
        """What tells the kernel's program from others, and what `compile` takes."""
        with jax.default_device(self._device):
            lowered = lower(kernel, self._device.platform)
        return hashlib.sha256(lowered.as_text().encode()).digest(), lowered

    def compile(self, lowered: Any) -> Any:
        """The executable. Any thread."""
        executable = lowered.compile().runtime_executable()
        return self._client.adopt_executable(compat.executable_pointer(executable), executable)


def stablehlo_version(attributes: dict[str, Any]) -> str:
    """The newest StableHLO version that a plugin says it reads."""
    found = attributes.get("stablehlo_current_version")
    if found is None:
        return "1.0.0"
    return found if isinstance(found, str) else ".".join(str(int(part)) for part in found)
