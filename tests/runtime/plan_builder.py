"""Builds small native plans by hand, one vertex at a time, without the planner."""

import functools

import jax
import jax.extend as jex
import numpy as np
from jax.interpreters import mlir

from jaxoffload import _jax_compat as compat
from jaxoffload import _native

DEVICE, ARGUMENT, RESULT, HOST = range(4)
KERNEL, RELOAD, OFFLOAD, TRANSFER = range(4)
HOST_KERNEL = 7
POLICIES = {"work conserving": 0, "fixed": 1, "random": 2}

_TYPES = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7,
    "uint32": 8, "uint64": 9, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 13,
    "complex64": 14, "complex128": 15,
}  # fmt: skip


def compile_options(num_devices=1):
    """A serialized CompileOptionsProto: one device; with several in the client, any of them."""
    options = compat.xla_client().CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.compile_portable_executable = num_devices > 1
    return options.SerializeAsString()


@functools.cache
def client(num_devices=1):
    """A client of the CPU plugin, shared by the tests."""
    made = _native.Client(compat.cpu_plugin_path(), num_devices)
    made.register_ffi_handlers(compat.cpu_custom_call_targets())
    return made


def lower(function, shapes, overwrites=()):
    """A kernel `function(*inputs) -> tuple`, as f(*inputs, *places).

    Args:
      overwrites: pairs (input position, output position).
    """
    outs = jax.eval_shape(function, *shapes)
    taken = {write for _, write in overwrites}
    places = [o for j, o in enumerate(outs) if j not in taken]
    count = len(shapes)
    donated = [read for read, _ in overwrites] + list(range(count, count + len(places)))
    jitted = jax.jit(
        lambda *operands: function(*operands[:count]), donate_argnums=donated, keep_unused=True
    )
    return _serialize(jitted.lower(*shapes, *places))


def _serialize(lowered):
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    return jex.mlir.serialize_portable_artifact(module, "1.9.0", False)


def aligned(shape, dtype, skew=0):
    """An uninitialized array at a multiple of 4096 bytes, or `skew` bytes beyond one."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 8192, np.uint8)
    start = -raw.ctypes.data % 4096 + skew
    return raw[start : start + size].view(dtype).reshape(shape)


class PlanBuilder:
    """Collects vertices and versions; data edges follow from who reads and writes what."""

    def __init__(self, num_devices=1):
        self.client = client(num_devices)
        self.num_devices = num_devices
        self.versions = []  # (space, index, offset, shape, dtype)
        self.vertices = []  # (kind, lane, priority, executable, inputs, outputs, overwritten, text)
        self.executables = []
        self.edges = set()
        self.writer = {}
        self.argument_bytes, self.result_bytes = {}, {}
        self.donated = []
        self._compiled = {}

    def version(self, space, index, offset, shape, dtype="float32"):
        self.versions.append((space, index, offset, tuple(shape), np.dtype(dtype)))
        end = offset + self.bytes_of(len(self.versions) - 1)
        sizes = {ARGUMENT: self.argument_bytes, RESULT: self.result_bytes}.get(space)
        if sizes is not None:
            sizes[index] = max(sizes.get(index, 0), end)
        return len(self.versions) - 1

    def bytes_of(self, version):
        _, _, _, shape, dtype = self.versions[version]
        return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def kernel(
        self, function, inputs, outputs, overwrites=(), device=0, priority=0.0, after=(),
        on_host=False,
    ):  # fmt: skip
        shapes = [jax.ShapeDtypeStruct(*self.versions[v][3:]) for v in inputs]
        key = (function, tuple((s.shape, s.dtype) for s in shapes), tuple(overwrites))
        if key not in self._compiled:
            self._compiled[key] = len(self.executables)
            code = lower(function, shapes, overwrites)
            self.executables.append(self.client.compile(code, compile_options(self.num_devices)))
        over = {write: inputs[read] for read, write in overwrites}
        overwritten = [over.get(j, -1) for j in range(len(outputs))]
        name = getattr(function, "__name__", "kernel")
        kind = HOST_KERNEL if on_host else KERNEL
        lane = _native.lane_of(np.array([kind]), np.array([device]), self.num_devices)[0]
        vertex = (kind, int(lane), priority, self._compiled[key], inputs, outputs, overwritten)
        return self._add((*vertex, name), after)

    def copy(self, kind, source, target, device=0, priority=0.0, after=()):
        lane = 3 * device + (2 if kind == OFFLOAD else 1)
        name = ("", "reload", "offload", "transfer")[kind]
        return self._add((kind, lane, priority, -1, [source], [target], [-1], name), after)

    def _add(self, vertex, after):
        vertex_id = len(self.vertices)
        self.vertices.append(vertex)
        for version in vertex[4]:
            if version in self.writer:
                self.edges.add((self.writer[version], vertex_id))
        for version in vertex[5]:
            self.writer[version] = vertex_id
        for tail in after:
            self.edges.add((tail, vertex_id))
        return vertex_id

    def arrays(self):
        """Arguments of _native.Plan."""

        def column(i, dtype):
            return np.array([v[i] for v in self.vertices], dtype=dtype)

        def csr(lists, dtype=np.int32):
            lists = [list(each) for each in lists]
            offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])])
            return offsets.astype(np.int32), np.array(
                [x for each in lists for x in each], dtype=dtype
            )

        def field(i, dtype):
            return np.array([v[i] for v in self.versions], dtype=dtype)

        heads = [[] for _ in self.vertices]
        for tail, head in sorted(self.edges):
            heads[tail].append(head)
        succ_offsets, succ = csr(heads)
        input_offsets, inputs = csr([v[4] for v in self.vertices])
        output_offsets, outputs = csr([v[5] for v in self.vertices])
        dims_offsets, dims = csr([v[3] for v in self.versions], np.int64)
        sizes = np.array([self.bytes_of(v) for v in range(len(self.versions))], dtype=np.int64)

        def high_water(space, index):
            return max(
                (
                    v[2] + s
                    for v, s in zip(self.versions, sizes, strict=True)
                    if v[:2] == (space, index)
                ),
                default=0,
            )

        return dict(
            client=self.client,
            executables=self.executables,
            kind=column(0, np.uint8),
            lane=column(1, np.int32),
            priority=column(2, np.float64),
            executable=column(3, np.int32),
            succ_offsets=succ_offsets,
            succ=succ,
            space=field(0, np.uint8),
            index=field(1, np.int32),
            offset=field(2, np.int64),
            bytes=sizes,
            dtype=np.array([_TYPES[v[4].name] for v in self.versions], dtype=np.int32),
            dims_offsets=dims_offsets,
            dims=dims,
            input_offsets=input_offsets,
            inputs=inputs,
            output_offsets=output_offsets,
            outputs=outputs,
            overwritten=np.array([o for v in self.vertices for o in v[6]], dtype=np.int32),
            arena_bytes=[int(high_water(DEVICE, d)) for d in range(self.num_devices)],
            host_bytes=int(high_water(HOST, 0)),
            argument_bytes=[self.argument_bytes[i] for i in range(len(self.argument_bytes))],
            result_bytes=[self.result_bytes[i] for i in range(len(self.result_bytes))],
            descriptions=[v[7] for v in self.vertices],
            donated=self.donated,
            residents=np.zeros(0, dtype=np.int32),
            owed=np.zeros(0, dtype=np.int32),
            returned=np.zeros(0, dtype=np.int32),
            first_of_sum=np.zeros(0, dtype=np.int32),
        )

    def build(self, **changes):
        return _native.Plan(**{**self.arrays(), **changes})


def run(plan, arguments, results, **options):
    """Runs a plan on NumPy arrays, and expects it to succeed."""
    report = try_run(plan, arguments, results, **options)
    assert not report.error_message, report.error_message
    return report


def try_run(plan, arguments, results, **options):
    return plan.run([a.ctypes.data for a in arguments], [r.ctypes.data for r in results], **options)
