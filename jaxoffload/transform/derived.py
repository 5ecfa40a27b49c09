"""What was made of an offloaded jaxpr, for as long as who offloaded it keeps it.

Takes what calls, transformations and lowerings of the primitive (primitive.py) make; gives it to
the next one. The primitive's params lead here by a weak reference.
"""

import weakref
from collections.abc import Callable
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.errors import PlanError
from jaxoffload.once import OnceEach
from jaxoffload.runtime import backends
from jaxoffload.runtime.plan import Plan


class Derived:
    """What was made from one offloaded jaxpr: plans, the jaxpr batched, and its derivatives.

    Args:
      written: see `Link`.

    Attributes:
      cuts: the jaxpr in parts, by `least_bytes`.
      parts: of each part's jaxpr the same as this.
      known_parts: see `in_parts`.
      refusal: of a plan over several devices that was made for XLA's partitioner, which passes
        on its words alone.
      link: leads here, as a param of the primitive, for as long as the owner keeps it.
    """

    def __init__(self, written: Any = None) -> None:
        self.plans = OnceEach()
        self.cuts = OnceEach()
        self.parts = OnceEach()
        self.known_parts: dict[Any, Any] = {}
        self.batched = OnceEach()
        self.derivatives = OnceEach()
        self.refusal: PlanError | None = None
        self.link = Link(self, written)
        _all_derived.add(self)

    @classmethod
    def of_plan(cls, plan: Plan, jaxpr: Any, params: dict[str, Any]) -> "Derived":
        """With a plan made before, of arrays that are all on the device."""
        found = cls()
        key = plan_key({**params, "jaxpr": jaxpr, "tier_leaves": (), "fixed": ()}, plan.backend)
        found.plans.get(key, lambda: (jaxpr, plan))
        return found

    def spread_as_written(self, jaxpr: Any, make: Callable[[], Any]) -> Any:
        """What each device does of a jaxpr whose shard_maps say so, under the mesh that is set."""
        key = "spread as written", id(jaxpr), compat.context_mesh()
        return self.plans.get(key, lambda: (jaxpr, make()))[1]  # the jaxpr is kept, and so its id

    def made_plans(self) -> list[Plan]:
        """Every plan made so far, of what was batched, too."""
        own = [plan for _, plan in self.plans.made() if isinstance(plan, Plan)]
        inner = [*self.parts.made(), *(derived for *_, derived in self.batched.made())]
        for _, found in self.derivatives.made():
            inner += found.derived
        return own + [plan for derived in inner for plan in derived.made_plans()]

    def clear(self) -> None:
        """Forgets it; programs that are compiled keep what they have."""
        self.plans.clear()
        self.cuts.clear()
        self.parts.clear()
        self.known_parts.clear()
        self.batched.clear()
        self.derivatives.clear()


class Link:
    """A weak reference to a `Derived`. JAX keeps the params of thousands of equations in its
    caches; plans are not to live as long.

    Attributes:
      written: what transformations start from, the jaxpr with operations that have rules of their
        own (a library's, or the `custom_vjp` of newer JAX); None: the jaxpr has none.
    """

    __slots__ = ("_derived", "written")

    def __init__(self, derived: Derived, written: Any = None):
        self._derived, self.written = weakref.ref(derived), written

    def get(self) -> Derived:
        """What it leads to, or a new one."""
        return self._derived() or Derived(self.written)

    def __repr__(self) -> str:
        return "Link()"


def lowered(written: Any) -> tuple[Any, Derived]:
    """What is planned of a jaxpr that a transformation made, and what keeps what is made of it."""
    jaxpr = compat.lowered_operations(written)
    return jaxpr, Derived(None if jaxpr is written else written)


_all_derived: weakref.WeakSet[Derived] = weakref.WeakSet()


def clear_plans() -> None:
    """Forgets every plan that was made inside a transformation."""
    for derived in list(_all_derived):
        derived.clear()


def plan_key(params: dict[str, Any], backend: backends.Backend) -> tuple[Any, ...]:
    """What tells a plan from others of the same `Derived`, which keeps the jaxpr, and so its id."""
    below = {i: array.tier for i, array in params["tier_leaves"]}
    return (
        id(params["jaxpr"]), params["donated"], params["options"], *below.items(), params["fixed"],
        backend.name,
    )  # fmt: skip
