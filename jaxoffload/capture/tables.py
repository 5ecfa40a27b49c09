"""Tables below the device of which few rows are read or changed: the passes over a Program, in
their order."""

from collections.abc import Sequence, Set

from jaxoffload.capture.demand import Large
from jaxoffload.capture.flat import Program
from jaxoffload.capture.row_gradients import with_gradients_by_rows
from jaxoffload.capture.row_updates import with_rows_updated, with_rows_updated_in_copies
from jaxoffload.capture.rows_on_disk import with_rows_read


def with_rows_alone(
    program: Program,
    donated: Sequence[tuple[int, int]],
    on_disk: Set[int],
    in_host: Set[int],
    *,
    all_in_host: bool,
    any_rate: bool,
    large: Large | None,
) -> None:
    """Has equations that need few rows of tables move those alone.

    Args:
      donated: pairs (argument, result).
      on_disk: arguments there.
      in_host: arguments that stay in host memory from call to call.
      all_in_host: whether every argument is in host memory.
      any_rate: see `with_gradients_by_rows`.
      large: see `scan.unroll`.
    """
    with_rows_read(program, on_disk)
    below = on_disk | in_host | ({i for i, _ in donated} if all_in_host else set())
    with_gradients_by_rows(program, donated, below, any_rate)
    with_rows_updated(program, donated, on_disk, in_host)
    if large is not None:
        with_rows_updated_in_copies(program, donated, on_disk, large.bytes)
