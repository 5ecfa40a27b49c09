"""Evaluates a jaxpr equation by equation, to be traced anew with something changed.

Takes a jaxpr and its operands; gives its results. Loops and branches are traced anew around their
bodies, calls are replaced by theirs. What changes, a subclass says: how an equation is applied
(ordered.py adds tokens, device_body.py does one device's part of it,
`jaxoffload/transform/verification.py` works in float64).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.inline import CALL_BODY


class Evaluator:
    """Evaluates as the jaxpr says.

    Attributes:
      state: what goes from each equation to the next beside its values, a pytree; loops carry it
        and branches give it. A subclass that has some sets it.
      calls: the parameter that holds the body, for each call that is replaced by it.
    """

    state: Any = ()
    calls = CALL_BODY

    def run(self, body: Any, operands: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr, closed or without constants."""
        jaxpr, constants = body, ()
        if isinstance(body, compat.ClosedJaxpr):
            jaxpr, constants = body.jaxpr, body.consts
        values: dict[Any, Any] = {}

        def write(variables: Sequence[Any], found: Sequence[Any]) -> None:
            for var, value in zip(variables, found, strict=True):
                values[var] = self.value(var, value)

        def read(atom: Any) -> Any:
            return self.literal(atom) if isinstance(atom, compat.Literal) else values[atom]

        write(jaxpr.constvars, constants)
        write(jaxpr.invars, operands)
        for eqn in jaxpr.eqns:
            write(eqn.outvars, self.apply(eqn, list(map(read, eqn.invars))))
        return list(map(read, jaxpr.outvars))

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Results of an equation, by those in it if it has a body."""
        name = eqn.primitive.name
        if (body := eqn.params.get(self.calls.get(name, ""))) is not None:
            return self.run(body, operands)
        rules = {"scan": self.scan, "while": self.loop, "cond": self.branches}
        with compat.at_line_of(eqn):
            return rules.get(name, self.operation)(eqn, operands)

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Results of an equation as it stands."""
        return compat.evaluate(eqn, operands, eqn.params)

    def value(self, var: Any, value: Any) -> Any:
        """What is kept of a variable's value."""
        return value

    def literal(self, atom: Any) -> Any:
        return atom.val

    def carried(self, values: Sequence[Any]) -> list[Any]:
        """What goes from one round of a loop to the next, or out of a branch."""
        return list(values)

    def scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params, (first, count) = eqn.params, compat.scan_counts(eqn)
        fixed, carry, xs = (
            operands[:first],
            operands[first : first + count],
            operands[first + count :],
        )

        def step(carry: Any, xs: Any) -> Any:
            self.state, values = carry
            results = self.run(params["jaxpr"], [*fixed, *values, *xs])
            return (self.state, self.carried(results[:count])), results[count:]

        (self.state, carry), stacks = lax.scan(
            step,
            (self.state, self.carried(carry)),
            xs,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacks]

    def loop(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """A `while`, whose condition changes no state."""
        condition, body, carry = self.parts_of_loop(eqn, operands)
        state, carry = lax.while_loop(
            lambda carry: self._from(carry[0], condition, carry[1])[1][0],
            lambda carry: self._from(carry[0], body, carry[1]),
            (self.state, self.carried(carry)),
        )
        self.state = state
        return carry

    def parts_of_loop(self, eqn: Any, operands: list[Any]) -> tuple[Any, Any, list[Any]]:
        """A while's condition and body, as functions of what it carries, and that."""
        params = eqn.params
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return (
            lambda carry: self.run(params["cond_jaxpr"], [*operands[:a], *carry]),
            lambda carry: self.run(params["body_jaxpr"], [*operands[a:b], *carry]),
            operands[b:],
        )

    def branches(self, eqn: Any, operands: list[Any]) -> list[Any]:
        def branch(body: Any) -> Callable[..., Any]:
            return lambda state, *inputs: self._from(state, lambda x: self.run(body, x), inputs)

        self.state, results = lax.switch(
            operands[0], list(map(branch, eqn.params["branches"])), self.state, *operands[1:]
        )
        return results

    def _from(self, state: Any, function: Callable[..., Any], inputs: Any) -> tuple[Any, list[Any]]:
        """The state after a function that begins with another, and its results."""
        self.state = state
        results = self.carried(function(inputs))
        return self.state, results
