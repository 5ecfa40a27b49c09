"""What a function computes by the platform that it runs on (`jax.lax.platform_dependent`).

Takes a closed jaxpr and a platform; gives the jaxpr with calls of that platform's branches, which
can be cut like all else, in the place of conditionals. It is traced once for every platform, and
planned for one.
"""

from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.inline import CALL_BODY
from jaxoffload.capture.rebuild import Rebuilder
from jaxoffload.capture.whole import every_equation


def for_platform(closed: Any, platform: str) -> Any:
    """The closed jaxpr for one platform; itself where it is for any.

    Args:
      platform: "cpu" or "cuda"; what is to run on the host's cores (`compute_on`) is for "cpu".

    Raises:
      NotImplementedError: something that it computes is for other platforms only.
    """
    if not any(map(compat.platforms_of, every_equation(closed.jaxpr))):
        return closed

    def resolved(eqn: Any) -> Any:
        platforms = compat.platforms_of(eqn) or ()
        here = "cpu" if compat.is_on_host(eqn) else platform
        for names, branch in zip(platforms, eqn.params.get("branches", ()), strict=False):
            if names is None or here in names:
                return compat.call_in_place(eqn, branch, eqn.invars[1:])
        return eqn

    def of_host(eqn: Any) -> Any:
        """What a call asks for the host's cores as a whole."""
        if eqn.primitive.name not in CALL_BODY or not compat.asks_for_host(eqn):
            return eqn
        bodies = {
            name: for_platform(body, "cpu")
            for name, body in eqn.params.items()
            if isinstance(body, compat.ClosedJaxpr)
        }
        return eqn.replace(params={**eqn.params, **bodies})

    made = Rebuilder(equation=of_host).closed(closed)
    made = Rebuilder(equation=resolved).closed(made)
    for eqn in every_equation(made.jaxpr):
        if compat.platforms_of(eqn):
            raise NotImplementedError(
                f"platform_dependent at {compat.source_line(eqn.source_info)} has neither a branch "
                f"for the platform {platform!r} nor a default."
            )
    return made
