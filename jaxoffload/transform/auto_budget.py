"""device_memory="auto": of what is free when a function is traced, how much its plan may use."""

AUTO_MARGIN = 0.1
"""Share of the free memory that device_memory="auto" leaves. Beside arena, workspace, host tier and
results, the first runs of the two steps of benchmarks/ratios.py took 38 and 92 MiB (thread stacks,
buffers of XLA's products, allocator slack); the rest is for neighbours."""
KNOWN_MARGIN = 0.03
"""The same where a profile tells what runs take: what is left is for other processes."""


def auto_budget(free: int, unseen_bytes: int) -> int:
    """Bytes of the free ones.

    Args:
      unseen_bytes: what a profile says that runs take beside their plans; 0 if nothing does.
    """
    margin = int(free * AUTO_MARGIN)
    if unseen_bytes:
        margin = int(free * KNOWN_MARGIN) + unseen_bytes
    return _rounded(max(1, free - margin))


def _rounded(budget: int) -> int:
    """A budget down to five binary digits, at most a sixteenth less: what is free differs from
    process to process, and the plan that one has made is to serve the next."""
    step = 1 << max(0, budget.bit_length() - 5)
    return budget // step * step
