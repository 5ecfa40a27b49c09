"""`offload`: a function that runs within a device memory budget."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.options import make_options
from jaxoffload.policies import LaunchPolicy
from jaxoffload.runtime.profile import Profile
from jaxoffload.transform import partitioned, rules
from jaxoffload.transform.offloaded import Offloaded
from jaxoffload.transform.signature import ArgumentSpec


def offload(
    function: Callable[..., Any] | None = None,
    *,
    device_memory: int | float | str | Sequence[int | float | str] | None = "auto",
    host_memory: int | float | str | None = None,
    memory: int | float | str | None = None,
    disk: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    launch: str | LaunchPolicy = "work-conserving",
    vertex_memory: int | str | None = None,
    check: bool = False,
    verify: bool = False,
    results: str = "device",
    policy: str = "auto",
    recompute: str = "auto",
    host_compute: str = "auto",
    cut: str = "auto",
    rewrites: str | bool | Sequence[str] = False,
    deterministic: bool = True,
    profile: Any = None,
) -> Any:
    """Makes a function run within a device memory budget, with the same results.

    Use it where you would use `jax.jit`, best around the whole step: `offload(train_step)`; of
    `grad(offload(loss))` both passes are offloaded, each by itself. Works as a decorator, with or
    without options; called directly or inside `jax.jit`.

    Args:
      function: takes and returns pytrees of arrays.
      device_memory: bytes of device memory that it may use: a number, or text such as "512MiB".
        "auto": what the device has free when the function is first planned, less a tenth (or less
        what runs took beside their plans, if `profile` tells). None: no limit. Of a function over
        several devices (`jax.shard_map`) it is of each; a list has one for each, in the mesh's
        order.
      host_memory: bytes of host memory that may hold what the device cannot; None for no limit.
        Arguments and results are the caller's and not counted.
      memory: on a CPU, in place of those two: bytes of RAM for all that a call takes beside its
        arguments: tensors, workspace, and results that follow no donated argument. Moving a tensor
        to another place in RAM would save nothing. So values are split and recomputed, and with a
        `disk` moved there, until the sum fits: docs/memory.md.
      disk: a folder, or several in a list, to go on to where `host_memory` is full: a fast local
        drive. Files there have no name, are private, and vanish with the process.
      donate_argnums, donate_argnames: arguments whose memory the results may take; as for
        `jax.jit`. They cannot be used afterwards.
      static_argnums, static_argnames: arguments that are compiled in; as for `jax.jit`.
      launch: "work-conserving", "fixed", or a policy from `jaxoffload.policies`.
      vertex_memory: the largest working set of a vertex in bytes. It fixes the cut into vertices,
        and with it every rounding: results are then equal bit for bit whatever the budget. None
        lets the cut follow the budget.
      check: watch every run for two tensors in one place at one time (slower; for tests).
      verify: compare the first run with plain `jax.jit`, and with float64 where they differ by more
        than rounding, which needs the memory for that.
      results: "host": results come back as `HostArray`s, for those that the device cannot hold
        (outside `jax.jit` only). Results of donated arrays in a lower tier stay in their tier
        either way.
      policy: "auto": after some direct calls the plan is made again from what they measured, if a
        simulation says that it pays, and taken back if it does not; the cut stays, and with it
        every bit of the results. Only the first call may change the cut, and so the rounding: where
        its kernels took twice as long as another cut promises. "once": the first plan stays.
      recompute: "auto": values that would not stay on the device until they are read again are
        recomputed instead of moved, as far as a simulation says that this is faster (random
        numbers come from the same keys; loops and sorts are not recomputed). "never": they are
        moved. "always": all are recomputed, as with `jax.checkpoint` everywhere. With
        `vertex_memory` nothing is.
      host_compute: "auto": what an optimizer does to a parameter runs on the host's cores, on the
        parameter and its state where the caller has them, as far as a simulation says that this is
        faster than moving them to the device and back; it starts as soon as the gradient has
        arrived, beside the rest of the backward pass. "never": on the device. "always": all of it
        on the host's cores. Unless everything fits, or with "never", what is in
        `compute_on("device_host")` is there too. On a CPU these are the device's cores too.
      cut: "auto": a function is cut into vertices only where memory demands it; where everything
        fits it runs whole, as `jax.jit` would run it, at any first call's and any step's price.
        "always": it is cut there, too. That takes longer to compile, and on a CPU training steps
        may run faster than jit's, for layers of a scan are then programs of their own.
      rewrites: False: none, results are those of the function as it is written; `explain` says
        where "auto" would save much. True: products, gathers and segment sums are done in the order
        that takes least time, rows are worked on before they are repeated, and no matrix is made
        for each row that chooses one, where 5% of the function's estimated time or more is saved:
        docs/rewrites.md. Results are equal within rounding, dtypes are kept. "auto": only where
        that saves half of it, or more. A tuple names those that may be done, of "compact",
        "reorder" and "typed".
      deterministic: False: where devices sum something large (`psum`, `reduce_scatter`), each adds
        up its part as the others' arrive, in one place, in place of all of them at once in the
        order of ranks. One that is late holds up nothing but itself; where none is, it takes as
        long or longer. Results are equal within rounding, but no longer to the bit from run to run.
      profile: what earlier runs measured: a `Profile`, or the path of a saved one. The function is
        cut and planned for the machine that they found, so that results may differ by rounding
        from those without. Also `Offloaded.profile`, which goes on measuring.

    Returns:
      An `Offloaded`: callable like `function`, with `plan`, `explain` and `last_run`.

    Raises:
      TypeError, ValueError: an option's value is not legal; says what is.
      PlanError: (when called) the budget is too small; says the smallest that can work.

    >>> import jax.numpy as jnp
    >>> import jaxoffload as jo
    >>> double = jo.offload(lambda x: 2 * x, device_memory=None)
    >>> double(jnp.arange(3))
    Array([0, 2, 4], dtype=int32)

    References:
      TURNIP: a "nondeterministic" GPU runtime with CPU RAM offload, sections 4 to 7.
    """
    measured = profile if isinstance(profile, Profile) else None
    if measured is None:
        measured = Profile() if profile is None else Profile.load(profile)
    options = make_options(
        device_memory, host_memory, disk, vertex_memory, launch, check, verify, results, policy,
        recompute, cut, measured.known_rates(), memory, host_compute,
        rewrites, deterministic,
    )  # fmt: skip

    def decorate(f: Callable[..., Any]) -> Offloaded:
        if not callable(f):
            raise TypeError(
                f"offload: function={f!r} is a {type(f).__name__}. Pass a function of arrays."
            )
        spec = ArgumentSpec(f, static_argnums, static_argnames, donate_argnums, donate_argnames)
        return Offloaded(f, spec, options, measured)

    return decorate if function is None else decorate(function)


partitioned.register()
rules.register()
compat.hide_frames_of(__file__)
