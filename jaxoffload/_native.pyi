"""The C++ runtime: custom_calls/bindings."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxoffload.graphs.columns import Columns

class Client:
    """A PJRT client of our own, with the arenas and lanes that its plans share. Thread-safe.

    Args:
      plugin_path: shared library of a PJRT plugin; loaded once a process.
      num_devices: compute lanes; each is a device of the client.

    Raises:
      RuntimeError: the plugin cannot be loaded, or its C API does not fit.
    """

    def __init__(self, plugin_path: str, num_devices: int = 1) -> None: ...
    @staticmethod
    def adopt(
        plugin_path: str,
        client: int,
        ordinals: Sequence[int],
        host: Client | None = None,
        driver_path: str = "",
    ) -> Client:
        """A client of CUDA's plugin that JAX has made, and keeps.

        Args:
          client: the PJRT_Client.
          ordinals: the driver's numbers of the devices to use.
          host: one of ours for CPU, which runs what is for the host's cores.
          driver_path: for tests; the system's driver if empty.

        Raises:
          RuntimeError: the driver or the plugin does not fit. ValueError: no such device, or no
          client.
        """
    @property
    def platform_name(self) -> str: ...
    @property
    def platform_version(self) -> str: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def attributes(self) -> dict[str, str | int | list[int] | float | bool]:
        """What the plugin tells, `stablehlo_current_version` and `pjrt_c_api_version` among it."""
    def compile(self, code: bytes, options: bytes) -> Executable:
        """Compiles StableHLO with a serialized CompileOptionsProto; the GIL is released.

        Raises:
          RuntimeError: with XLA's message; in a forked child.
        """
    def load(self, serialized: bytes) -> Executable:
        """Loads what `Executable.serialize` gave, on the same plugin and the same kind of CPU; the
        GIL is released. The bytes are machine code, which is trusted.

        Raises:
          RuntimeError: with XLA's message; in a forked child.
        """
    def adopt_executable(self, executable: int, owner: Any) -> Executable:
        """A PJRT_LoadedExecutable that JAX has compiled, and that lives as long as `owner`."""
    def register_ffi_handlers(self, handlers: Sequence[tuple[str, Any]]) -> None:
        """Makes FFI handlers (capsules) known to the plugin. Names that it knows are left alone."""
    def trim(self) -> None:
        """Gives the device arenas' pages back to the system, after the runs that are queued."""
    def throttle_copies(self, bytes_per_second: int, shared: bool = False) -> bool:
        """Lets no copy of the CPU backend be faster than this, as behind another machine's link; 0
        ends that. `shared`: all devices have one link to the host together, in each direction.
        False where copies go over a real link, and nothing changes.
        """
    def arena_bytes(self, device: int = 0) -> int:
        """Bytes of a device's arena that the largest living plan needs."""
    def arena_resident_bytes(self, device: int = 0) -> int:
        """Bytes of a device's arena that are in memory now."""

class Executable:
    """A compiled kernel. Sizes are XLA's own, in bytes."""

    @property
    def num_outputs(self) -> int: ...
    @property
    def temp_bytes(self) -> int: ...
    @property
    def argument_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def alias_bytes(self) -> int: ...
    @property
    def code_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> bytes:
        """Empty where the plugin has none."""
    def serialize(self) -> bytes:
        """Bytes for `Client.load`; the GIL is released.

        Raises:
          RuntimeError: the plugin cannot, or this was loaded itself: it would lose its code.
        """

class RunReport:
    """What happened in a run. Times are nanoseconds from its start, -1 for what did not run."""

    @property
    def start_ns(self) -> np.ndarray: ...
    @property
    def end_ns(self) -> np.ndarray: ...
    @property
    def lane(self) -> np.ndarray: ...
    @property
    def lane_busy_ns(self) -> np.ndarray: ...
    @property
    def wall_ns(self) -> int: ...
    @property
    def ended_ns(self) -> int:
        """When the run ended, on the clock of `time.monotonic_ns`."""
    @property
    def peak_device_bytes(self) -> int:
        """Highest address in use in any device's arena."""
    @property
    def peak_live_bytes(self) -> int:
        """Most bytes of one device that were live at once; -1 unless the run was checked."""
    @property
    def bytes_offloaded(self) -> int: ...
    @property
    def bytes_reloaded(self) -> int: ...
    @property
    def bytes_transferred(self) -> int: ...
    @property
    def bytes_loaded(self) -> int:
        """Read from disk."""
    @property
    def rows_loaded(self) -> int:
        """Rows of tables, by number, among them; each once a vertex."""
    @property
    def rows_stored(self) -> int:
        """Likewise, among `bytes_stored`."""
    @property
    def bytes_stored(self) -> int:
        """Written to disk."""
    @property
    def bytes_found(self) -> int:
        """Of arguments, that an earlier run had left on a device."""
    @property
    def bytes_left(self) -> int:
        """Of results, that stay on a device and are owed."""
    @property
    def copied_outputs(self) -> int:
        """Outputs that XLA did not write in place and that were copied there."""
    @property
    def realigned_bytes(self) -> int:
        """Argument bytes that were copied first: unaligned, or donated without being shared."""
    @property
    def cancelled(self) -> bool: ...
    @property
    def touched_results(self) -> list[int]:
        """By result, 1 if some vertex had begun to write it."""
    @property
    def error_vertex(self) -> int:
        """The first vertex that failed; -1 if none did."""
    @property
    def error_message(self) -> str:
        """Empty if the run succeeded."""

class Plan:
    """A MemGraph with its executables, checked and copied into flat C++ arrays.

    A kernel's executable takes its input versions in order, then one place for each output that
    overwrites none, in output order.

    Args:
      executables: indexed by `executable`; None where no vertex needs it.
      lane: of each vertex; see `lane_of`.
      priority: of each vertex; the largest ready one starts first.
      succ_offsets, succ: heads of each vertex's edges, CSR; a head is after its tail.
      dtype: PJRT_Buffer_Type of each version.
      arena_bytes: of each device that the plan uses.
      donated: pairs of argument and result that are one range of memory.
      disk: what holds the plan's own tensors on disk, `disk_bytes` or more.
      argument_on_disk, result_on_disk: of each flat argument and result.
      is_alone: whether pages that other plans have left are given back before each run.
      The others are those of MemGraph, or named after its properties.

    Raises:
      ValueError: an array is wrong; the message names it and the entry.
    """

    def __init__(
        self,
        *,
        client: Client,
        executables: Sequence[Executable | None],
        kind: np.ndarray,
        lane: np.ndarray,
        priority: np.ndarray,
        executable: np.ndarray,
        succ_offsets: np.ndarray,
        succ: np.ndarray,
        space: np.ndarray,
        index: np.ndarray,
        offset: np.ndarray,
        bytes: np.ndarray,
        dtype: np.ndarray,
        dims_offsets: np.ndarray,
        dims: np.ndarray,
        input_offsets: np.ndarray,
        inputs: np.ndarray,
        output_offsets: np.ndarray,
        outputs: np.ndarray,
        overwritten: np.ndarray,
        arena_bytes: Sequence[int],
        host_bytes: int,
        argument_bytes: Sequence[int],
        result_bytes: Sequence[int],
        descriptions: Sequence[str] = ...,
        donated: Sequence[tuple[int, int] | list[int]] = ...,
        disk_bytes: int = 0,
        disk: DiskExtent | None = None,
        argument_on_disk: Sequence[bool] = (),
        result_on_disk: Sequence[bool] = (),
        is_alone: bool = False,
        residents: np.ndarray,
        owed: np.ndarray,
        returned: np.ndarray,
        first_of_sum: np.ndarray,
    ) -> None: ...
    @property
    def num_vertices(self) -> int: ...
    @property
    def num_versions(self) -> int: ...
    @property
    def arena_bytes(self) -> list[int]: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def argument_bytes(self) -> list[int]: ...
    @property
    def result_bytes(self) -> list[int]: ...
    def run(
        self,
        arguments: Sequence[int | HostBuffer | DiskSource],
        results: Sequence[int | HostBuffer | DiskExtent],
        *,
        policy: int = 0,
        seed: int = 0,
        max_delay_us: int = 0,
        check: bool = False,
        may_help: bool = True,
        ended: Callable[[RunReport], object] | None = None,
    ) -> RunReport:
        """Runs the plan and waits, without the GIL. Failures are in the report.

        Args:
          arguments, results: what holds the flat arrays' bytes, and is held during the run; or
            their address, and then the caller keeps them.
          policy: 0 work-conserving, 1 fixed order, 2 random.
          max_delay_us: with policy 2, vertices sleep up to this long before and after.
          check: watch the ranges in use and stop at the first race.
          may_help: the thread that calls may execute kernels itself, where runs are short. Not
            those that call back into Python: Ctrl-C would come in the middle of that.
          ended: called with the report however the run ends, before this returns or raises. Not
            called where the run never began.

        Raises:
          ValueError: arrays or options are wrong. RuntimeError: this is a forked child, or the
          system gives no threads. KeyboardInterrupt: the run was cancelled, and has ended.
        """
    def residents(self) -> list[tuple[int, int]]:
        """Arguments, and bytes of them, that runs have left on devices and that are there now."""
    def release(self) -> None:
        """Gives them up, once what is owed is paid; the arenas too if nothing else is there."""
    def last_report(self) -> RunReport | None:
        """Of the latest run that ended, from Python or from a custom call."""

class HostBuffer:
    """Page-aligned memory in the host tier's block; `numpy.asarray` views it.

    Args:
      nbytes: size. The contents are anything.
    """

    def __init__(self, nbytes: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Bytes that runs have left on a device and owe to it are copied first.

        Raises:
          RuntimeError: they are lost.
        """
    @property
    def num_loans(self) -> int:
        """How many objects of other libraries have its memory."""

    def lend(self, shape: list[int], code: int, bits: int) -> Any:
        """An object with `__dlpack__` over its memory, as an array from its start on.

        Args:
          code, bits: of DLPack's data type.
        """

    def renew_stamp(self) -> None:
        """Tells that its contents have changed: no run takes what is on a device for them."""

class DiskSource:
    """Bytes that are somewhere on disk. Thread-safe."""

    @property
    def bytes(self) -> int: ...
    def read_into(self, buffer: np.ndarray, offset: int = 0) -> None:
        """Fills a uint8 array from a byte offset on, without the GIL.

        Raises:
          OSError: the disk failed, or gave back other bytes than were written.
        """

    @property
    def stamp(self) -> int:
        """Changes with what is there, as far as this process knows."""
    def read_rows(self, buffer: np.ndarray, ids: np.ndarray, row_bytes: int) -> None:
        """Fills a uint8 array with rows of so many bytes, without the GIL.

        Args:
          ids: int64[N], ascending, no row twice.

        Raises:
          IndexError: an id is none of the rows. OSError: the disk failed.
        """

    def keep_rows_in(self, cache: RowCache) -> bool:
        """Has rows that a cache keeps come from there, for as long as there is the cache. False
        where there is another one. Waits for writes that are under way, without the GIL.

        Raises:
          RuntimeError: this is a forked child.
        """

class RowCache:
    """Rows of a table on disk that are in memory, and how often each was taken. Thread-safe.

    Args:
      bytes, row_bytes: of the table, and of each of its rows.
      room: most rows that are kept.

    Raises:
      ValueError: there is no room for one, or more than the table has. MemoryError: there is not as
      much memory.
    """

    def __init__(self, bytes: int, row_bytes: int, room: int) -> None: ...
    @property
    def hits(self) -> int:
        """Rows that were taken from memory, each once a call."""

    @property
    def misses(self) -> int:
        """Rows that were taken from disk, likewise."""

    def keep(self, source: DiskSource, ids: np.ndarray) -> None:
        """Keeps these rows and no others; reads those that are not there yet, without the GIL.

        Args:
          ids: int64[N], ascending, no row twice, no more than there is room for.

        Raises:
          IndexError: an id is none of the rows. ValueError: they are not in order, or too many.
          OSError: the disk failed; then fewer are kept.
        """

    def taken(self) -> np.ndarray:
        """How often each row was taken, older times counting less: float32[rows]."""

    def age(self, by: float) -> None:
        """Multiplies what was taken until now."""

    def kept(self) -> np.ndarray:
        """Numbers of the rows that are there, int64, ascending."""

class DiskExtent(DiskSource):
    """Space in a store; given back when the object goes. Every 16 KiB carry a CRC32C."""

    def write_rows(self, buffer: np.ndarray, ids: np.ndarray, row_bytes: int) -> None:
        """Overwrites rows by a uint8 array; ids and errors as `read_rows`'."""

    def write(self, buffer: np.ndarray, offset: int = 0) -> None:
        """Writes a uint8 array from a byte offset on, without the GIL.

        Raises:
          OSError: the disk failed, or this is a forked child, to which the bytes do not belong.
        """

class FileRange(DiskSource):
    """A range of an existing file, read only and without checksums. Made by `DiskFile.range`."""

class DiskFile:
    """A regular file that is open for reading: one descriptor, however many ranges of it are made.

    Raises:
      OSError: the file cannot be opened, or is a pipe, a folder, a device.
    """

    def __init__(self, path: str) -> None: ...
    @property
    def bytes(self) -> int: ...
    def range(self, offset: int, bytes: int) -> FileRange:
        """Some of its bytes; reading them fails once the file has changed.

        Raises:
          OSError: the file is shorter. ValueError: a number is negative.
        """

class DiskStore:
    """Files without names in one folder or several, over which bytes are striped. Thread-safe.

    Args:
      engine: "io_uring", "threads", or "auto": io_uring where the system has it.
      queue_depth: requests in flight.
      request_bytes: of one request; a multiple of 16384.

    Raises:
      OSError: a folder is missing or cannot be written to. ValueError: an option is not legal.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        engine: str = "auto",
        queue_depth: int = ...,
        request_bytes: int = ...,
    ) -> None: ...
    @property
    def engine(self) -> str: ...
    @property
    def engine_reason(self) -> str:
        """Why this engine, and whether the page cache is bypassed."""
    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
    def stats(self) -> dict[str, int]:
        """reserved_bytes, bytes_read, bytes_written (ever)."""
    def reserve(self, bytes: int) -> DiskExtent:
        """Takes space now.

        Raises:
          OSError: the disk is full, or this is a forked child, to which the store does not belong.
        """

class PlanRegistration:
    """A plan under a key by which custom calls find it while their program is compiled; they hold
    it themselves from then on.

    Args:
      bound: arguments that no operand brings: which, and what holds them.
      fixed: arguments that are the same in all iterations of a loop: which, and by how much the
        stamp of each is after the first of the loop's. That is the last operand, if there are some.
    """

    def __init__(
        self,
        plan: Plan,
        bound: Sequence[tuple[int, int | HostBuffer | DiskSource]] = (),
        fixed: Sequence[tuple[int, int]] = (),
    ): ...
    @property
    def key(self) -> str: ...

class Looks:
    """What is told of some objects, to know others that look the same. It holds none of them.

    Args:
      leaves: the objects.
      attributes: by each type that they have, names of attributes, compared by `==`; of a method
        what it returns. None that leads to the object itself.

    Raises:
      TypeError: an object is of another type.
    """

    def __init__(self, leaves: list[Any], attributes: dict[type, tuple[str, ...]]) -> None: ...
    def match(self, leaves: list[Any]) -> bool:
        """Whether as many objects have the same types, and the same attributes, one by one."""

def are_distinct(leaves: Sequence[Any]) -> bool:
    """Whether no object is there twice."""

def num_registered_plans() -> int:
    """How many registrations are alive."""

def ffi_targets() -> dict[str, tuple[dict[str, Any], Any]]:
    """By XLA's name of the platform, what `jax.ffi.register_ffi_target` takes for the target
    "jaxoffload_run", and `jax.ffi.register_ffi_type` for what its calls hold."""

def devices_target() -> tuple[dict[str, Any], Any]:
    """The same for the target "jaxoffload_run_devices", on CPU."""

def stamps_handler() -> Any:
    """What `jax.ffi.register_ffi_target` takes for the target "jaxoffload_stamps", on CPU: of any
    operands the first of as many new stamps, uint32[2]."""

def cuda_driver(path: str = "") -> dict[str, Any]:
    """What the NVIDIA driver says: version, and of each device name, free_bytes, total_bytes.

    Raises:
      RuntimeError: there is none, or it finds no GPU.
    """

def host_stats() -> dict[str, int]:
    """Of the host tier: in_use_bytes, peak_bytes, kept_bytes (free, probably in memory),
    hole_bytes (free below the highest place in use), largest_hole_bytes, num_allocated, num_freed;
    num_fixed_requests: of io_uring, to and from its places, by way of registered buffers;
    pinned_bytes, num_pin_failures, num_unpin_failures: for copies by a GPU.
    """

def host_is_pinned(address: int, nbytes: int) -> bool:
    """Whether a range is in the host tier and pinned, so that a GPU can read it where it is."""

def place_on_skyline(
    lower: Sequence[int],
    upper: Sequence[int],
    size: Sequence[int],
    order: Sequence[int],
    capacity: int,
) -> list[int]:
    """Offsets of buffers, or an empty list; see plan/alloc/placement.py.

    Args:
      order: each buffer's number, those to be placed first in front.

    Raises:
      ValueError: the lists do not match, a buffer ends before it begins, or no such order.
    """

def place_intervals(
    lower: Sequence[int], upper: Sequence[int], size: Sequence[int], capacity: int, max_steps: int
) -> list[int]:
    """Offsets of buffers, or an empty list; see plan/placement.py.

    Args:
      max_steps: buffers that are placed at most, all tries together: about three million a second.

    Raises:
      ValueError: lists of several lengths, an empty interval or buffer, or sums beyond 64 bits.
    """

def best_cuts(
    bytes: np.ndarray,
    until: np.ndarray,
    written: np.ndarray,
    written_offsets: np.ndarray,
    read: np.ndarray,
    read_offsets: np.ndarray,
    alone: np.ndarray,
    is_elementwise: np.ndarray,
    is_product: np.ndarray,
    ends: np.ndarray,
    crossing: np.ndarray,
    price: float,
    max_bytes: float,
    where_all_fuse: float,
    max_products: int,
) -> tuple[np.ndarray, float]:
    """Where each run of a stretch of operations begins, and the least `max_bytes` that gives the
    same; see planner/best_cuts.h, and capture/cluster.py for what is counted.

    Args: int64 arrays, but for float64 `crossing`; `written` and `read` are numbers of values.

    Raises:
      ValueError: arrays that do not fit one another.
    """

def next_writers(
    memory: np.ndarray, start: np.ndarray, end: np.ndarray, time: np.ndarray
) -> np.ndarray:
    """Pairs (old, new), flattened: at some address new is the next to be written after old.

    Args: int64 arrays, one entry for each range of addresses [start, end) of a memory.
      time: when it is written; negative: it is there from the start.
    """

def reaches(
    num_vertices: int, tail: np.ndarray, head: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """For each pair (start, end) whether a path of one edge or more leads there, uint8.

    Args: int64 arrays. Edges point from smaller to larger numbers.

    Raises:
      ValueError: one does not, or names no vertex.
    """

VICTIM_RULES: tuple[str, ...]
"""Rules by which victims are chosen (custom_calls/planner/victims.h)."""

def build_memgraph(
    columns: Columns,
    capacity: Sequence[int],
    host_capacity: int | None,
    disk: bool,
    in_place_io: bool,
    victims: int,
    lookahead: int | None,
    places: Sequence[int],
    unreduced: bool,
    residents: Sequence[int],
) -> dict[str, np.ndarray] | int:
    """The arrays of a MemGraph by their names there, or the tensor for which the host tier has no
    room; see plan/alloc/build.py.

    Args:
      columns: a TaskGraph that `check` accepts, with the working set of each of its vertices within
        `capacity`.
      capacity: bytes of each device's arena.
      host_capacity: bytes of the host tier, None for no limit.
      victims: one of VICTIM_RULES, by its position.
      places: of each tensor, -1 for any; or empty.

    Raises:
      ValueError: a column or an option has the wrong length or names what is not there, or the
        order is none; of a graph with working sets beyond `capacity` it is RuntimeError.
    """

def in_place(columns: Columns, in_place_io: bool) -> tuple[np.ndarray, np.ndarray]:
    """Whether each entry of `inputs` is read where the caller has it, and whether each of `outputs`
    is written there; uint8.

    Args:
      in_place_io: as in build_memgraph; if not, only rows that are gathered are read there.
    """

def serial_orders(columns: Columns, seconds: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Other serial orders of a TaskGraph's vertices, by name, int32; those that differ from its own
    and from one another.

    Args:
      seconds: time of each vertex, float64.
    """

class Successors:
    """The edges of a MemGraph, for what runs along them; see plan/cost/simulate.py.

    Args:
      tail, head: int32, one entry for each edge, from smaller vertices to larger ones.

    Raises:
      ValueError: an edge points backwards or names no vertex; here and below, an array has not one
        entry for each vertex.
    """

    def __init__(self, num_vertices: int, tail: np.ndarray, head: np.ndarray) -> None: ...
    def longest_paths(self, seconds: np.ndarray) -> np.ndarray:
        """The longest path from the start of each vertex, in seconds, float64."""

    def simulate(
        self,
        seconds: np.ndarray,
        lane: np.ndarray,
        num_lanes: int,
        priority: np.ndarray,
        fixed: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """When each vertex starts and ends, float64.

        Args:
          seconds, priority: float64; of the vertices that are ready on a lane that of the largest
            priority starts first, of equal ones that of the smallest number.
          lane: int32.
          fixed: a lane takes its vertices in their order only.
        """

def host_release() -> None:
    """Gives the free pages of the host tier back to the system."""

def host_set_cap(nbytes: int) -> None:
    """How many bytes of free pages may stay in memory."""

def set_host_callback(
    function: Callable[[int, list[np.ndarray], list[np.ndarray]], str],
) -> None:
    """Has the custom call "jaxoffload_callback" of the CPU plugin call a function, for good.

    Args:
      function: takes the call's attribute `number` and the bytes of its operands and its results,
        which it fills; both are there for as long as it runs. Returns what went wrong, or "". Any
        thread, with the GIL.
    """

def host_callback_handler() -> Any:
    """The call's FFI handler, for `Client.register_ffi_handlers`."""

policy_names: tuple[str, ...]
"""What launch policies are called, by their numbers."""

lane_names: tuple[str, ...]
"""What lanes are called: `device_lanes` that every device has, then the disk's."""

device_lanes: int

def lane_of(kind: np.ndarray, device: np.ndarray, num_devices: int) -> np.ndarray:
    """The number of the lane on which each vertex runs, int32.

    Lanes are numbered device by device, in the order of `lane_names`; the disk's come last.

    Args:
      kind, device: of each vertex, as in MemGraph.
      num_devices: of the client.
    """

ffi_api_version: tuple[int, int]
"""XLA FFI API of the headers that this was built with: (major, minor)."""

def take_rows(
    table: np.ndarray, ids: np.ndarray, row_bytes: int, to: np.ndarray, num_threads: int
) -> None:
    """Copies rows ids[i] (int64) of one uint8 array to rows i of another, by several threads.

    Raises:
      IndexError: an id is none of the rows.
    """

def put_rows(
    table: np.ndarray, ids: np.ndarray, row_bytes: int, values: np.ndarray, num_threads: int
) -> None:
    """Copies rows i of one uint8 array to rows ids[i] of another; no row may be named twice.

    Raises:
      IndexError: an id is none of the rows.
    """

def sample_neighbours(
    offsets: np.ndarray,
    sources: np.ndarray,
    relations: np.ndarray,
    seeds: np.ndarray,
    fanouts: Sequence[int],
    per_relation: bool,
    seed: int,
    num_threads: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, their offsets by hop; sources, destinations, relations of edges, their offsets.

    Args:
      offsets: int64[N + 1], of the edges into each node, which lie side by side by relation.
      sources, relations: int32[E], trusted to be in range.
      seeds: int32[S], each once.
      fanouts: for each hop; negative: all.

    Raises:
      ValueError: a seed is no node, or is there twice.
    """
