"""Mctx: a tree search, whose loop is of as many trees as there are roots."""

import jax
import jax.numpy as jnp

from tests.libraries import library
from tests.libraries.agree import assert_as_jit, normal


def test_a_search_by_mctx():
    mctx = library("mctx")

    def searched(matrix, policy, x):
        def step(params, key, action, state):
            state = jnp.tanh(state @ matrix + 0.1 * action[:, None])
            made = mctx.RecurrentFnOutput(
                reward=state[:, 0],
                discount=jnp.full(len(state), 0.99),
                prior_logits=state @ policy,
                value=state[:, 1],
            )
            return made, state

        root = mctx.RootFnOutput(prior_logits=x @ policy, value=x[:, 1], embedding=x)
        found = mctx.gumbel_muzero_policy(
            params=(),
            rng_key=jax.random.key(0),
            root=root,
            recurrent_fn=step,
            num_simulations=6,
            max_num_considered_actions=4,
        )
        return found.action_weights, found.search_tree.node_values

    args = normal(32, 32) / 6, normal(32, 4), normal(8, 32)
    assert_as_jit(searched, *args, shares=(0,))
