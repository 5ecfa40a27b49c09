"""Launch policies: which ready vertex goes first. The result never depends on it, only the time."""

import dataclasses

from jaxoffload import _native


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchPolicy:
    """A launch policy; make one with the functions below.

    Attributes:
      name: one of `NAMES`.
      seed: of the random choices and delays.
      max_delay_seconds: the longest delay injected before a vertex (random only).
    """

    name: str
    seed: int = 0
    max_delay_seconds: float = 0.0

    @property
    def code(self) -> int:
        """The number by which the runtime knows the policy."""
        return NAMES.index(self.name)


NAMES: tuple[str, ...] = _native.policy_names


def work_conserving() -> LaunchPolicy:
    """No lane idles while a vertex is ready for it; the most critical goes first (the default)."""
    return LaunchPolicy("work-conserving")


def fixed() -> LaunchPolicy:
    """Each lane keeps the plan's serial order: what a static schedule would do, for comparison."""
    return LaunchPolicy("fixed")


def random(seed: int = 0, delays: float = 0.0) -> LaunchPolicy:
    """Any ready vertex, by a seeded choice; for tests.

    Args:
      seed: a number from 0 to 2**63 - 1.
      delays: the longest delay in seconds that is injected before a vertex starts or completes.

    Raises:
      ValueError: a negative seed or delay.
    """
    if not 0 <= seed < 2**63:
        raise ValueError(
            f"policies.random: seed={seed} is not within 0 to 2**63 - 1. Pass another."
        )
    if not 0 <= delays <= 10:
        raise ValueError(f"policies.random: delays={delays} is not within 0 to 10 seconds.")
    return LaunchPolicy("random", seed, delays)


def as_policy(launch: object) -> LaunchPolicy:
    """A policy from a policy or its name.

    Raises:
      TypeError, ValueError: names the legal values.
    """
    if isinstance(launch, LaunchPolicy):
        return launch
    legal = ", ".join(repr(n) for n in NAMES) + ", or one made by jaxoffload.policies"
    if not isinstance(launch, str):
        raise TypeError(f"offload: launch={launch!r} is a {type(launch).__name__}. Pass {legal}.")
    if launch not in NAMES:
        raise ValueError(f"offload: launch={launch!r} is not a launch policy. Pass {legal}.")
    return LaunchPolicy(launch)
