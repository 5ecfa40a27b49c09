"""From a kernel to an executable: by the plugin that we load, or by JAX on its own client.

Both lower a kernel to something that `compile` takes, with a digest that tells programs apart, also
in another process. What the plugin compiles is kept in the store (store/), where others find it by
that digest; JAX keeps what it compiles by its own settings.
"""

import functools
import hashlib
import logging
import re
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import operations
from jaxoffload.capture.kernel import Kernel
from jaxoffload.capture.whole import with_bodies
from jaxoffload.compile import callbacks
from jaxoffload.compile.lower import lower, portable
from jaxoffload.compile.options import compile_options, flags_for
from jaxoffload.errors import CaptureError
from jaxoffload.store import place

logger = logging.getLogger(__name__)

_UNKNOWN_TARGET = re.compile(
    r"No (?:FFI handler registered for|registered implementation for untyped custom call to) (\S+)"
)

_PLAIN, _WITH_LAPACK = b"\0", b"\1"
"""How an entry begins: JAX looks for LAPACK when it lowers a call of it, and what is loaded has
been lowered in another process."""


class PluginCompiler:
    """Compiles portable StableHLO on a client of a plugin that JAX does not know.

    Args:
      client: has `compile(code, options)`, `load(serialized)` and `attributes`.
      flags: of the compiler, without what kernels' sizes change (`options.flags_for`).
      platform: gives text on which machine code depends beside program and options.
    """

    def __init__(self, client: Any, flags: dict[str, Any], platform: Callable[[], str]):
        self._client, self._flags = client, flags
        self._called: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._version = stablehlo_version(client.attributes)
        self._platform = platform

    @functools.cached_property
    def _described(self) -> bytes:
        made = hashlib.sha256(compile_options(self._flags))
        made.update(self._platform().encode())
        return made.digest()

    @property
    def described(self) -> bytes:
        """On what machine code depends beside the program: a digest, and what JAX is set to."""
        return self._described + bytes([compat.optimizes_little()])

    def lower(self, kernel: Kernel) -> tuple[bytes, Any]:
        """What tells the kernel's program from others, and what `compile` takes."""
        with callbacks.collected() as called:
            code = portable(lower(kernel, "cpu"), self._version)
        options = compile_options(flags_for(kernel, self._flags))
        digest = hashlib.sha256(self._described + options + code).digest()
        return digest, (code, called, options, kernel)

    def load(self, digest: bytes) -> Any:
        """The executable of a program, if it is kept: None otherwise. Any thread."""
        folder = place.current()
        kept = None if folder is None else folder.read(_name(digest))
        if kept is None:
            return None
        if kept[:1] == _WITH_LAPACK:
            compat.load_lapack()
        try:
            return self._with_handlers(self._client.load, kept[1:])
        except RuntimeError as error:  # of another plugin, whatever the name says
            logger.info("A kept executable is compiled anew: %s", error)
            return None

    def compile(self, digest: bytes, code: Any) -> Any:
        """The executable, which is kept for other processes. Any thread.

        Raises:
          CaptureError: it calls what only JAX's own client can call.
        """
        program, called, options, kernel = code
        try:
            executable = self._with_handlers(self._client.compile, program, options)
        except RuntimeError as error:
            if (name := _unknown_target(error)) is not None:
                raise _foreign(kernel, name) from error
            usual = compile_options(self._flags)
            if options == usual:
                raise
            executable = self._client.compile(program, usual)
        if called:  # a program has numbers of functions of this process
            self._called[executable] = called
        elif (folder := place.current()) is not None:
            needs = _WITH_LAPACK if b"lapack_" in program else _PLAIN
            folder.write(_name(digest), needs + executable.serialize())
        return executable

    def _with_handlers(self, make: Callable[..., Any], *args: Any) -> Any:
        """An executable, whose custom calls the client learns to know while it is made."""
        learnt: set[str] = set()
        while True:
            try:
                return make(*args)
            except RuntimeError as error:
                name = _unknown_target(error)
                if name is None or name in learnt:
                    raise
                if (handler := compat.ffi_handler(name)) is None:
                    raise
                learnt.add(name)
                self._client.register_ffi_handlers([(name, handler)])


def _unknown_target(error: RuntimeError) -> str | None:
    """The name of the custom call for which an error says that there is no handler."""
    found = _UNKNOWN_TARGET.search(str(error))
    return found and found[1]


def _foreign(kernel: Kernel, name: str) -> CaptureError:
    """Says which operation calls what only JAX's own client can call."""
    eqns = [e for s in kernel.steps if s.operation.eqn for e in with_bodies(s.operation.eqn)]
    named = [e for e in eqns if e.params.get("target_name") == name]
    strange = [e for e in eqns if operations.known(e.primitive.name) is operations.known("")]
    eqn = next(iter([*named, *strange, *eqns]))
    return CaptureError(
        f"offload: {eqn.primitive} at {compat.source_line(eqn.source_info)} calls {name!r}, which "
        "JAX's own client alone can. Vertices run on another, which takes typed FFI handlers that "
        "have no stage but their execution. Call it outside the offloaded function."
    )


def _name(digest: bytes) -> str:
    return f"executable-{digest.hex()}"


class JaxCompiler:
    """Has JAX compile, with its own options and caches, on the client that the runtime shares.

    Args:
      client: the native client, which adopts executables.
      devices: where vertices run, all of one kind.
    """

    def __init__(self, client: Any, devices: tuple[Any, ...]):
        self._client, self._devices = client, devices

    def lower(self, kernel: Kernel) -> tuple[bytes, Any]:
        """What tells the kernel's program from others, and what `compile` takes."""
        refuse_callbacks(kernel)
        with jax.default_device(self._devices[0]):
            lowered = lower(kernel, self._devices[0].platform)
        return hashlib.sha256(lowered.as_text().encode()).digest(), lowered

    described = b""
    """It has no store of ours."""

    def load(self, digest: bytes) -> Any:
        """None: JAX itself looks among what it keeps, when it compiles."""

    def compile(self, digest: bytes, lowered: Any) -> Any:
        """The executable. Any thread."""
        if len(self._devices) > 1:
            executable = compat.compile_for_any(lowered, self._devices)
        else:
            executable = lowered.compile().runtime_executable()
        return self._client.adopt_executable(compat.executable_pointer(executable), executable)


class WithHost:
    """Two compilers as one: of a device's kernels, and of those of the host's cores."""

    def __init__(self, device: Any, host: Any):
        self._device, self._host = device, host

    @property
    def described(self) -> bytes:
        """As the device's."""
        return self._device.described

    def lower(self, kernel: Kernel) -> tuple[bytes, Any]:
        """What tells the kernel's program from others, and what `compile` takes."""
        digest, code = (self._host if kernel.on_host else self._device).lower(kernel)
        return bytes([kernel.on_host]) + digest, code

    def load(self, digest: bytes) -> Any:
        """The executable of a program, if it is kept. Any thread."""
        return self._of(digest).load(digest[1:])

    def compile(self, digest: bytes, code: Any) -> Any:
        """The executable. Any thread."""
        return self._of(digest).compile(digest[1:], code)

    def _of(self, digest: bytes) -> Any:
        return self._host if digest[0] else self._device


def stablehlo_version(attributes: dict[str, Any]) -> str:
    """The newest StableHLO version that a plugin says it reads."""
    found = attributes.get("stablehlo_current_version")
    if found is None:
        return "1.0.0"
    return found if isinstance(found, str) else ".".join(str(int(part)) for part in found)


def refuse_callbacks(kernel: Kernel) -> None:
    """Refuses kernels that call back into Python, on platforms where vertices cannot.

    Raises:
      CaptureError: names the line.
    """
    for step in kernel.steps:
        eqn = step.operation.eqn
        inner = () if eqn is None else with_bodies(eqn)
        found = next((e for e in inner if e.primitive in compat.CALLBACKS), None)
        if found is not None:
            raise CaptureError(
                f"offload: {found.primitive} at {compat.source_line(found.source_info)} runs in "
                "host memory, and a GPU does not wait for it in a loop or a conditional that is "
                "one vertex. Call it outside of that, or outside the offloaded function."
            )
