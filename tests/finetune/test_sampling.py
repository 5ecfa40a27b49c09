"""Which tokens may be drawn, and how often they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload.finetune.sampling import choose, make_sampling

PROBS = np.array([0.05, 0.4, 0.0, 0.3, 0.2, 0.05])


def draws(count, **options):
    """As many, each in a row of its own."""
    sampling = make_sampling(count, seed=7, **options)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(PROBS, jnp.float32) + 1e-30), (count, 6))
    return np.asarray(jax.jit(choose)(logits, sampling, jnp.int32(3)))


@pytest.mark.parametrize(
    "temperature, top_p, kept",
    [
        (1.0, 1.0, [0, 1, 3, 4, 5]),
        (2.0, 1.0, [0, 1, 3, 4, 5]),
        (1.0, 0.39, [1]),
        (1.0, 0.41, [1, 3]),
        (1.0, 0.69, [1, 3]),
        (1.0, 0.85, [1, 3, 4]),
        # Flattened: 0.332, 0.288, 0.235, 0.117, 0.117 of 1.089.
        (2.0, 0.7, [1, 3, 4]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature, top_p, kept):
    count = 20_000
    want = np.zeros(6)
    want[kept] = PROBS[kept] ** (1 / temperature)
    want /= want.sum()
    found = np.bincount(draws(count, temperature=temperature, top_p=top_p), minlength=6) / count
    # Five standard deviations of a binomial distribution.
    assert np.all(np.abs(found - want) <= 5 * np.sqrt(want * (1 - want) / count))


def test_without_a_temperature_the_likeliest_is_taken():
    assert set(draws(5, temperature=0.0, top_p=0.5)) == {1}


def test_places_and_rows_are_drawn_apart():
    sampling = make_sampling(64, 1.0, 1.0, 0)
    logits = jnp.zeros((64, 1000))
    first, again, later = (np.asarray(choose(logits, sampling, jnp.int32(k))) for k in (1, 1, 2))
    assert np.array_equal(first, again) and np.mean(first == later) < 0.1
    assert len(set(first)) > 50
