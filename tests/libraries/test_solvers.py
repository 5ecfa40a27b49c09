"""JAXopt, Lineax, Optimistix, OTT: minimizers, linear and nonlinear systems, transport, implicit
gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.libraries import library
from tests.libraries.agree import assert_as_jit, normal

A = normal(6, 6)
SYSTEM = A @ A.T / 6 + np.eye(6, dtype=np.float32)


def test_ridge_regression_by_jaxopt():
    jaxopt = library("jaxopt")

    def loss(w, strength, x, y):
        return jnp.mean((x @ w - y) ** 2) + strength * w @ w

    def solution(strength, x, y):
        # The loop as one of JAX's: what "auto" does depends on who is asking.
        solver = jaxopt.GradientDescent(loss, maxiter=40, jit=True, unroll=False)
        return solver.run(jnp.zeros(3), strength, x, y).params

    assert_as_jit(solution, np.float32(0.1), normal(12, 3), normal(12))
    gradient = jax.grad(lambda s, x, y: jnp.sum(solution(s, x, y)))
    assert_as_jit(gradient, np.float32(0.1), normal(12, 3), normal(12))


def test_a_projected_gradient_by_jaxopt():
    """Its loops have numbers among what they do not change."""
    jaxopt = library("jaxopt")

    def solution(x, y):
        solver = jaxopt.ProjectedGradient(
            fun=lambda w, x, y: jnp.mean((x @ w - y) ** 2),
            projection=jaxopt.projection.projection_simplex,
            maxiter=8,
            jit=True,
        )
        return solver.run(jnp.ones(64) / 64, x=x, y=y).params

    assert_as_jit(solution, normal(96, 64), normal(96), shares=(0,))


def test_a_plan_of_transport_by_ott():
    library("ott")
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    def cost(x, y):
        points = pointcloud.PointCloud(x, y, epsilon=0.5)
        problem = linear_problem.LinearProblem(points)
        found = sinkhorn.Sinkhorn(threshold=1e-2, max_iterations=40)(problem)
        return found.reg_ot_cost

    assert_as_jit(cost, normal(60, 4), 1 + normal(50, 4), shares=(0,))


def test_a_linear_system_by_lineax():
    lineax = library("lineax")

    def solution(a, b):
        return lineax.linear_solve(lineax.MatrixLinearOperator(a), b).value

    assert_as_jit(solution, SYSTEM, normal(6), in_jit=True)
    assert_as_jit(jax.grad(lambda a, b: jnp.sum(solution(a, b) ** 2)), SYSTEM, normal(6))


def test_a_root_and_least_squares_by_optimistix():
    optimistix = library("optimistix")

    def root(a):
        solver = optimistix.Newton(rtol=1e-5, atol=1e-5)
        return optimistix.root_find(lambda y, a: a @ y + y**3 - 1, solver, jnp.zeros(6), a).value

    def squares(a):
        solver = optimistix.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
        start = jnp.ones(6)
        return optimistix.least_squares(lambda y, a: jnp.tanh(a @ y) - 0.1, solver, start, a).value

    assert_as_jit(root, SYSTEM)
    assert_as_jit(squares, SYSTEM)
