"""The only folder that touches private parts of JAX or asks for its version.

Supported: jax 0.10 to 0.12. What changes between them, or is not public, is wrapped in a function
whose name says what we need, in the module of its subject; nothing else in the package imports
`jax._src` or `jaxlib`. Stages use this list, and not the modules.
"""

# ruff: noqa: F401
from jaxoffload._jax_compat.arrays import (
    ARRAY_LOOKS,
    arrays_over,
    collect_released_buffers,
    committed_to,
    is_deleted,
    is_in_rows,
    pointer_of,
    weakly_typed,
)
from jaxoffload._jax_compat.equations import (
    asks_for_host,
    call_back,
    calls_back,
    devices_of_constraint,
    effect_kind,
    equation_context,
    evaluate,
    evaluate_alone,
    is_on_host,
    is_own_primitive,
    is_tree_of_params,
    lowered_operations,
    own_primitives,
    pure_callback_p,
    put,
    scan_counts,
    with_results,
    without_internal_refs,
)
from jaxoffload._jax_compat.lowering import (
    LoweringSettings,
    Rules,
    is_export,
    is_lowering_kernels,
    keep_alive,
    lower,
    one_ir_context,
    operation_named,
    portable_stablehlo,
)
from jaxoffload._jax_compat.plugins import (
    CUDA_PLUGINS,
    client_pointer,
    clients,
    compile_only,
    compile_only_device,
    cpu_custom_call_targets,
    cpu_plugin_path,
    cuda_plugin_path,
    cuda_version,
    executable_pointer,
    gpu_description,
    load_lapack,
    xla_client,
)
from jaxoffload._jax_compat.rules import (
    batched,
    checked,
    jet,
    register_batcher,
    register_check,
    register_jet,
)
from jaxoffload._jax_compat.tracing import (
    at_line_of,
    hide_frames_of,
    in_manual_region,
    is_jit_disabled,
    is_tracing,
    looks_for_special_values,
    name_arguments,
    no_mesh,
    optimizes_little,
    refuses_transfers_to_device,
    source_line,
    trace_context,
    transfers_allowed,
)
from jaxoffload._jax_compat.types import (
    ArrayImpl,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    ShapedArray,
    Tracer,
    bits,
    byte_count,
    is_array_like,
    is_extended,
    is_key,
    is_key_dtype,
    is_ref,
    is_symbolic,
    key_impl_name,
    mean_nothing,
    own_key_impl,
    physical,
    placement,
    sharding_in_type,
)
