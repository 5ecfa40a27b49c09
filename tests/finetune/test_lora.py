"""Adapters on pytrees of matrices, against float64 and against matrices that are made whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import lora
from tests.foreign import judge

CONFIG = lora.LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "up_proj"))
Q, UP = "model.layers.self_attn.q_proj", "model.layers.mlp.up_proj"


def stacked(dtype=np.float32, num_layers=4, width=8):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[-1]), dtype)

    layers = {
        "self_attn": {"q_proj": {"weight": normal(num_layers, width, width),
                                 "bias": normal(num_layers, width)},
                      "q_norm": {"weight": normal(num_layers, width)}},
        "mlp": {"up_proj": {"weight": normal(num_layers, width, width)}},
    }  # fmt: skip
    return {"model": {"embed_tokens": {"weight": normal(16, width)}, "layers": layers}}


def in_a_tuple(params):
    layers = params["model"]["layers"]
    rows = tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(4))
    return {"model": {**params["model"], "layers": rows}}


def trained(adapters, seed=1):
    """Adapters as training might leave them: B is no longer zero."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape) / 3, x.dtype), adapters
    )


def layer(x, weights):
    h = jnp.tanh(x @ weights["self_attn"]["q_proj"]["weight"].T)
    return x + h @ weights["mlp"]["up_proj"]["weight"].T, None


def forward(params, x):
    layers = params["model"]["layers"]
    if isinstance(layers, tuple):
        for weights in layers:
            x, _ = layer(x, weights)
        return x
    return jax.lax.scan(layer, x, layers)[0]


def reference(params, adapters, x, scale):
    """In float64, one layer after another, with W + scale · B A made whole."""
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, adapters, x))
    layers, x = wide[0]["model"]["layers"], wide[2]
    for i in range(4):
        q, up = (
            weights[i] + scale * wide[1][path]["lora_B"][i] @ wide[1][path]["lora_A"][i]
            for path, weights in (
                (Q, layers["self_attn"]["q_proj"]["weight"]),
                (UP, layers["mlp"]["up_proj"]["weight"]),
            )
        )
        x = x + np.tanh(x @ q.T) @ up.T
    return x


X = jnp.asarray(np.random.default_rng(2).standard_normal((2, 5, 8)), jnp.float32)


def test_fresh_adapters_are_peft_shaped_bounded_and_change_nothing():
    params = stacked()
    adapters = lora.init(params, CONFIG, jax.random.key(0))
    assert set(adapters) == {Q, UP}
    a = np.asarray(adapters[Q]["lora_A"])
    assert a.shape == (4, 3, 8) and adapters[Q]["lora_B"].shape == (4, 8, 3)
    assert np.abs(a).max() <= 1 / np.sqrt(8) and 0.15 < a.std() < 0.25  # uniform's is 0.204
    assert len(np.unique(a)) == a.size  # every layer draws for itself
    results = forward(lora.attach(params, adapters, CONFIG), X), forward(params, X)
    for got in results:  # XLA may multiply otherwise beside what adds nothing
        np.testing.assert_allclose(got, reference(params, adapters, X, 2.0), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("use_rslora, scale", [(False, 2.0), (True, 6 / np.sqrt(3))])
def test_attached_and_merged_equal_the_whole_matrices(use_rslora, scale):
    config = lora.LoraConfig(3, 6.0, use_rslora, target_modules=("q_proj", "up_proj"))
    params = stacked()
    adapters = trained(lora.init(params, config, jax.random.key(0)))
    want = reference(params, adapters, X, scale)
    attached = lora.attach(params, adapters, config)
    for got in (forward(attached, X), forward(lora.merge(params, adapters, config), X)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    back = lora.unmerge(lora.merge(params, adapters, config), adapters, config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), back, params)


def test_layers_in_a_tuple_draw_and_drop_as_stacked_ones():
    config = lora.LoraConfig(3, 6.0, dropout=0.5, target_modules=("q_proj", "up_proj"))
    params = stacked()
    apart = in_a_tuple(params)
    one, many = (lora.init(p, config, jax.random.key(0)) for p in (params, apart))
    assert f"model.layers.2.{Q[13:]}" in many
    np.testing.assert_array_equal(one[Q]["lora_A"][2], many[f"model.layers.2.{Q[13:]}"]["lora_A"])
    key = jax.random.key(7)
    one = trained(one)
    many = {
        f"model.layers.{i}.{path[13:]}": jax.tree.map(lambda x, i=i: x[i], pair)
        for path, pair in one.items()
        for i in range(4)
    }
    got = [forward(lora.attach(p, a, config, key), X) for p, a in ((params, one), (apart, many))]
    with jax.enable_x64(True):  # no rounding hides what was dropped
        wide = jax.tree.map(
            lambda x: np.asarray(x, np.float64), ((params, one, X), (apart, many, X))
        )
        exact = [forward(lora.attach(p, a, config, key), x) for p, a, x in wide]
        np.testing.assert_allclose(*exact, rtol=1e-12, atol=1e-12)
    without = forward(lora.attach(params, one, config), X)
    assert not np.allclose(got[0], without, atol=1e-2)
    np.testing.assert_allclose(without, reference(params, one, X, 2.0), rtol=2e-5, atol=2e-5)


def test_dropout_leaves_out_its_share_and_keeps_the_mean():
    config = lora.LoraConfig(1, 1.0, dropout=0.25, target_modules=("w",))
    params = {"w": jnp.zeros((1, 4096))}
    pair = {"w": {"lora_A": jnp.ones((1, 4096)), "lora_B": jnp.ones((1, 1))}}
    attached = lora.attach(params, pair, config, jax.random.key(3))
    total = float((jnp.ones((1, 4096)) @ attached["w"].T)[0, 0])
    assert abs(total / 4096 - 1) < 0.05 and total != 4096
    assert float(total * 0.75).is_integer()  # of elements that count 1 / 0.75 each


def test_fan_in_fan_out_matrices_are_used_untransposed():
    config = lora.LoraConfig(2, 2.0, target_modules=("c_attn",), fan_in_fan_out=True)
    params = {"c_attn": {"weight": jnp.ones((3, 5))}}
    adapters = trained(lora.init(params, config, jax.random.key(0)))
    pair = adapters["c_attn"]
    assert pair["lora_A"].shape == (2, 3) and pair["lora_B"].shape == (5, 2)
    want = np.ones((3, 5)) + (np.asarray(pair["lora_B"]) @ np.asarray(pair["lora_A"])).T
    x = np.eye(3, dtype=np.float32)  # NumPy's own @ must leave the product to the node
    attached = lora.attach(params, adapters, config)["c_attn"]["weight"]
    np.testing.assert_allclose(x @ attached, want, rtol=1e-6)
    np.testing.assert_allclose(x[:, :1].T @ attached.T.T, want[:1], rtol=1e-6)
    np.testing.assert_allclose(lora.merge(params, adapters, config)["c_attn"]["weight"], want)


def test_a_half_precision_base_keeps_its_dtype_and_gets_float32_adapters():
    params = stacked(jnp.bfloat16)
    adapters = trained(lora.init(params, CONFIG, jax.random.key(0)))
    assert adapters[Q]["lora_A"].dtype == np.float32
    attached = lora.attach(params, adapters, CONFIG)
    weight = jax.tree.map(lambda x: x[0], attached["model"]["layers"]["mlp"]["up_proj"]["weight"])
    x = X.astype(jnp.bfloat16)
    assert (x @ weight.T).dtype == jnp.bfloat16
    merged = lora.merge(params, adapters, CONFIG)
    assert jax.tree.map(lambda x: x.dtype, merged) == jax.tree.map(lambda x: x.dtype, params)
    got = merged["model"]["layers"]["mlp"]["up_proj"]["weight"]
    base = np.asarray(params["model"]["layers"]["mlp"]["up_proj"]["weight"], np.float64)
    pair = jax.tree.map(lambda x: np.asarray(x, np.float64), adapters[UP])
    want = base + 2 * pair["lora_B"] @ pair["lora_A"]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)


def test_arrays_below_the_device_merge_to_the_same_numbers(tmp_path):
    params = stacked()
    adapters = trained(lora.init(params, CONFIG, jax.random.key(0)))
    want = lora.merge(params, adapters, CONFIG)
    for below in (jo.host_put(params), jo.disk_put(params, tmp_path)):
        got = lora.merge(below, adapters, CONFIG)
        assert isinstance(got["model"]["layers"]["mlp"]["up_proj"]["weight"], np.ndarray)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


def test_gradients_equal_those_of_whole_matrices_also_offloaded_from_host_memory():
    params = stacked()
    adapters = trained(lora.init(params, CONFIG, jax.random.key(0)))

    def loss(adapters, params, x):
        return jnp.mean(forward(lora.attach(params, adapters, CONFIG), x) ** 2)

    def whole(adapters, params, x):
        return jnp.mean(forward(lora.merge(params, adapters, CONFIG), x) ** 2)

    exact, same = (judge.in_float64(jax.grad(f), (adapters, params, X)) for f in (loss, whole))
    for e, s in zip(exact, same, strict=True):
        np.testing.assert_allclose(e, s, rtol=1e-9, atol=1e-12)
    want = jax.jit(jax.grad(loss))(adapters, params, X)
    got = jo.offload(jax.grad(loss), device_memory="16KiB")(adapters, jo.host_put(params), X)
    for w, g, e in zip(*map(jax.tree.leaves, (want, got)), exact, strict=True):
        assert not judge.disagreement(np.asarray(w), np.asarray(g), e)


def test_attached_params_are_arguments_of_an_offloaded_function():
    params = stacked()
    adapters = trained(lora.init(params, CONFIG, jax.random.key(0)))
    attached = lora.attach(params, adapters, CONFIG)
    shapes = jax.eval_shape(forward, attached, X)
    assert shapes.shape == X.shape
    got = jo.offload(forward, device_memory="4KiB")(jo.host_put(attached), X)
    np.testing.assert_allclose(got, forward(attached, X), rtol=1e-5, atol=1e-5)
    grads = jax.grad(lambda p: jnp.sum(forward(p, X)))(attached)
    assert isinstance(grads["model"]["layers"]["mlp"]["up_proj"]["weight"], lora.LoraMatrix)


def test_a_regular_expression_names_whole_paths_and_only_matrices():
    config = lora.LoraConfig(2, target_modules=r"model\.layers\..*")
    assert set(lora.init(stacked(), config, jax.random.key(0))) == {Q, UP}
    flax_like = {"Dense_0": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    config = lora.LoraConfig(2, target_modules=("Dense_0",), fan_in_fan_out=True)
    assert set(lora.init(flax_like, config, jax.random.key(0))) == {"Dense_0.kernel"}


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"target_modules": ()}, "target_modules is empty"),
        ({"target_modules": "("}, "no regular expression"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        lora.LoraConfig(**settings)


@pytest.mark.parametrize(
    "targets, words",
    [
        (("q_pro",), "'q_pro', which names no matrix"),
        (("q_proj", "k_proj"), "'k_proj', which names no matrix"),
        (("q_norm",), "'q_norm', which names no matrix"),
        (("embed_tokens",), "'embed_tokens', which names no matrix"),
    ],
)
def test_targets_that_are_not_there_are_refused(targets, words):
    with pytest.raises(ValueError, match=words):
        lora.init(stacked(), lora.LoraConfig(target_modules=targets), jax.random.key(0))


def test_adapters_of_another_model_or_rank_are_refused():
    params = stacked()
    adapters = lora.init(params, CONFIG, jax.random.key(0))
    with pytest.raises(ValueError, match=r"lora_A of .*_proj is \[4, 3, 8\], must be \[4, 5, 8\]"):
        lora.attach(params, adapters, lora.LoraConfig(5))
    with pytest.raises(ValueError, match="lora_B of .* is missing"):
        lora.attach(params, {Q: {"lora_A": adapters[Q]["lora_A"]}}, CONFIG)
    with pytest.raises(ValueError, match="no matrix 'model.other'"):
        lora.merge(params, {"model.other": adapters[Q]}, CONFIG)
