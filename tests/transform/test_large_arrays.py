"""Arrays that do not fit into the budget: what reads them works piece by piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from jaxoffload.capture import demand, loops
from jaxoffload.capture import rows as rows_taken
from jaxoffload.search import program
from tests.foreign.judge import disagreement, in_float64

RANDOM = np.random.default_rng(0)
ROWS, COLUMNS = 20_011, 256  # a prime number of rows, 19.5 MiB
BUDGET = 4 << 20
X = RANDOM.standard_normal((ROWS, COLUMNS)).astype(np.float32)
Y = RANDOM.standard_normal((ROWS, 8)).astype(np.float32)
W = (RANDOM.standard_normal((COLUMNS, 8)) / 16).astype(np.float32)
FLAGS = RANDOM.random(ROWS) < 0.5


def regression(w, x, y):
    return jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)


def centered(x):
    return x - x.mean(0, keepdims=True)


def nearest(x, centers):
    squares = jnp.sum(x**2, 1, keepdims=True), jnp.sum(centers**2, 1)[None]
    distance = squares[0] - 2 * x @ centers.T + squares[1]
    which = jnp.argmin(distance, 1)
    return which, jnp.zeros_like(centers).at[which].add(x)


def roots(a):
    return lax.fori_loop(0, 6, lambda _, x: (x + a / x) / 2, jnp.ones_like(a))


def collatz(x, until):
    """How many of eight steps each number is above one of its row."""

    def step(_, state):
        z, times = state
        return jnp.where(z % 2 == 0, z // 2, 3 * z + 1), times + (z > until)

    return lax.fori_loop(0, 8, step, (x, jnp.zeros(x.shape, jnp.int32)))[1]


def recurrence(x, w):
    """Each row mapped by a matrix, and the sum of all rows at each of some steps."""

    def step(h, _):
        h = jnp.sin(h @ w @ w.T + x)
        return h, None

    return lax.scan(step, x, None, length=3)[0].sum(0)


WORDS = RANDOM.integers(0, ROWS, (2, 64)).astype(np.int32)
HEAD = X / 16  # of a vocabulary; 64 logits are 4.9 MiB


def cross_entropy(logits, labels):
    entries = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - entries).mean()


def tied_step(table, words):
    """One of descent, of an embedding that makes the logits, too."""
    loss = lambda table: cross_entropy(jnp.tanh(table[words[0]]) @ table.T, words[1])  # noqa: E731
    return table - 0.1 * jax.grad(loss)(table)


def dropped(x, seed):
    kept = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0).sum(0)


PROGRAMS = {
    "rows": (lambda x, w: jnp.tanh(x @ w), X, W),
    "regression": (regression, W, X, Y),
    "covariance": (lambda x: centered(x).T @ centered(x) / len(x), X),
    "standardized": (lambda x: centered(x) / x.std(0, keepdims=True), X),
    "least squares": (
        lambda x, y: jnp.linalg.solve(x.T @ x + jnp.eye(COLUMNS), x.T @ y), X, Y,
    ),
    "nearest": (nearest, X, X[:16]),
    "closest rows": (lambda x, q: lax.top_k(q @ x.T, 4), X, X[:8]),
    "some rows": (lambda x, f: jnp.where(f[:, None], x, 0).sum(0), X, FLAGS),
    "extremes": (lambda x: (x.max(0), x.min(0), jnp.argmax(x, 1), jnp.sort(x, 1)[:, :2]), X),
    "large result": (lambda y: jnp.exp(-((y[:, None, :128] - y[None, :8, :128]) ** 2)), X[:, :128]),
    "gathered": (lambda x, n: jnp.sin(x[n]), X[:64], RANDOM.integers(0, 64, ROWS)),
    "made of small": (
        lambda a, b: jnp.exp(-((jnp.cumsum(a)[:, None] / 100 - b[None]) ** 2)), Y[:, 0], W[:, 0],
    ),
    "bfloat16": (lambda x, w: (x @ w, x.sum(0)), X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)),
    "integers": (lambda x: (x.sum(), jnp.bincount(x.ravel() % 7, length=7)), X.astype(np.int32)),
    "single rows": (lambda x: (jnp.cos(x) * 2, x @ x[:2].T), X[:20_000].reshape(50, -1)),
    "Newton's steps": (roots, np.abs(X) + 1),
    "Collatz's steps": (
        collatz,
        RANDOM.integers(1, 999, X.shape).astype(np.int32),
        RANDOM.integers(1, 99, (ROWS, 1)).astype(np.int32),
    ),
    "histogram": (lambda x: jnp.histogram(x, 64, range=(-2, 2))[0], X),
    "steps beside": (
        lambda x, y: (x.sum(0), roots(y).sum(1)), X, np.abs(X[:2560]) + 1,
    ),
    "recurrence": (recurrence, X, W / 8),
    "softmax of logits": (lambda t, h: jax.nn.softmax(h @ t.T, 1) @ t, HEAD, X[:64]),
    "logits' gradient": (
        jax.value_and_grad(lambda h, t, n: cross_entropy(h @ t.T, n)), X[:64], HEAD, WORDS[0],
    ),
    "head's gradient": (
        jax.grad(lambda t, h, n: cross_entropy(h @ t.T, n)), HEAD, X[:64], WORDS[0],
    ),
    "tied": (tied_step, HEAD, WORDS),
    "dropout": (dropped, X, 3),
    "nearest rows": (
        lambda x, q: lax.top_k(2 * q @ x.T - (x**2).sum(1)[None], 5), X, X[:64] + 1,
    ),
    "likeliest": (lambda t, h: (jnp.argmax(h @ t.T, 1), jnp.argmin(t @ h.T, 0)), HEAD, X[:64]),
    "extreme rows": (lambda x: (jnp.argmax(x, 0), jnp.argmin(jnp.round(x), 0)), X),
    "largest two": (lambda x: tuple(v.sum(0) for v in lax.top_k(jnp.sin(x), 2)), X),
    "eigenvalues": (
        lambda x: [a.mean(0) for a in jnp.linalg.eigh(jnp.einsum("ni,nj->nij", x, x))],
        X[:1024, :128].reshape(-1, 16) + 4 * np.eye(16, dtype=np.float32)[np.arange(8192) % 16],
    ),
    "running sums": (
        lambda x: (jnp.cumsum(x, 0), lax.cumlogsumexp(x, 0, reverse=True).mean(0)), X,
    ),
    "drawdown": (
        lambda x: (lax.cummax(jnp.cumsum(x, 0), 0) - jnp.cumsum(x, 0)).max(0), X,
    ),
    "running integers": (
        lambda x: jnp.cumsum(x.ravel()) % 1000 + lax.cummin(x.ravel(), reverse=True),
        X.astype(np.int32),
    ),
    "counted": (lambda x: jnp.where(jnp.arange(ROWS)[:, None] % 3 == 0, x, 0).sum(0), X),
    "one step": (lambda x, y: x - 0.1 * (x * y + jnp.abs(x).mean()), X, X[::-1].copy()),
}  # fmt: skip


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_jit(name):
    function, *args = PROGRAMS[name]
    step = jo.offload(function, device_memory=BUDGET)
    got, want = step(*args), jax.jit(function)(*args)
    exact = in_float64(function, args)
    for g, w, e in zip(*map(jax.tree.leaves, (got, want, exact)), strict=True):
        assert not disagreement(np.asarray(w), np.asarray(g), e, ulps=4)
    assert step.last_run.peak_device_bytes <= BUDGET
    assert step.last_run.bytes_reloaded >= args[0].nbytes


@pytest.mark.parametrize("name", ["rows", "regression", "least squares", "nearest"])
def test_each_piece_is_read_once(name):
    """All that is done with one piece is done before the next comes."""
    function, *args = PROGRAMS[name]
    step = jo.offload(function, device_memory=BUDGET)
    step(*args)
    assert step.last_run.bytes_reloaded <= 1.05 * sum(x.nbytes for x in args)


def rows(x, w):
    return jnp.tanh(x @ w)


def test_the_smallest_budget_works_and_less_is_refused():
    with pytest.raises(jo.PlanError, match=r"test_large_arrays\.py:\d+") as refused:
        jo.offload(rows, device_memory=1)(X, W)
    least = refused.value.min_device_memory
    assert least < X.nbytes / 16
    got = jo.offload(rows, device_memory=least)(X, W)
    np.testing.assert_allclose(got, rows(X, W), rtol=1e-4, atol=1e-5)
    with pytest.raises(jo.PlanError):
        jo.offload(rows, device_memory=least - 1)(X, W)
    assert jo.offload(rows, device_memory=least).explain(X, W).min_device_memory == least


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_what_fits_is_not_cut():
    step = jo.offload(rows, device_memory=X.nbytes + (2 << 20))
    assert len(step.plan(X, W).taskgraph.vertices) <= 2


@pytest.mark.parametrize("name", ["regression", "covariance", "nearest"])
def test_bits_are_the_same_in_any_order_and_every_run_is_proven(name):
    function, *args = PROGRAMS[name]
    step = jo.offload(function, device_memory=BUDGET, check=True, verify=True)
    want = step(*args)
    for seed in range(2):
        policy = jo.policies.random(seed, delays=1e-4)
        shuffled = jo.offload(function, device_memory=BUDGET, launch=policy)
        for g, w in zip(*map(jax.tree.leaves, (shuffled(*args), want)), strict=True):
            np.testing.assert_array_equal(g, w)


def test_under_jit_and_in_gradients():
    step = jo.offload(lambda w, x, y: regression(w, x, y)[0], device_memory=BUDGET)
    want = jax.jit(jax.grad(lambda w: regression(w, X, Y)[0]))(W)
    np.testing.assert_allclose(jax.grad(step)(W, X, Y), want, rtol=1e-4, atol=1e-7)
    got = jax.jit(jax.value_and_grad(step))(W, X, Y)[1]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


def test_arrays_on_disk_and_results_that_go_there(tmp_path):
    x = jo.disk_put(X, tmp_path)
    step = jo.offload(
        lambda x: centered(x), device_memory=BUDGET, disk=str(tmp_path), host_memory="8MiB",
        results="host",
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(step(x)), centered(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["add", "set", "max", "multiply"])
def test_rows_of_a_copy_are_changed_in_host_memory(way):
    function = lambda x, n, y: getattr(x.at[n], way)(y)  # noqa: E731
    args = X, RANDOM.integers(-3, ROWS + 3, 96).astype(np.int32), X[100:196]
    if way == "set":  # of a row that is named twice either value may be there
        args = X, RANDOM.permutation(ROWS)[:96].astype(np.int32), X[100:196]
    kept = X.copy()
    step = jo.offload(function, device_memory="1MiB", check=True)
    np.testing.assert_allclose(step(*args), jax.jit(function)(*args), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(X, kept)
    assert step.last_run.bytes_reloaded < 1 << 20


def test_a_donated_array_is_written_in_place():
    step = jo.offload(lambda x, w: x - 0.1 * (x @ w) @ w.T, device_memory=BUDGET, donate_argnums=0)
    x = jo.host_put(X.copy())
    want = jax.jit(lambda x, w: x - 0.1 * (x @ w) @ w.T)(X, W)
    np.testing.assert_allclose(np.asarray(step(x, W)), want, rtol=1e-5, atol=1e-5)
    assert x.is_deleted()


def test_float64_is_float64_although_the_plan_is_made_outside():
    def function(x):
        return jnp.sin(x) @ (0.1 * jnp.ones((COLUMNS, 2)))

    with jax.enable_x64(True):
        x = RANDOM.standard_normal((ROWS // 2, COLUMNS))
        want = jax.jit(function)(x)
        plan = jo.offload(function, device_memory=2 * x.nbytes + BUDGET, cut="always").plan(x)
    least = plan.min_device_memory  # which is that of pieces
    with jax.enable_x64(True):
        got = jo.offload(function, device_memory=least)(x)
    assert got.dtype == np.float64 and least < BUDGET
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["regression", "covariance"])
def test_where_the_budget_is_ram_what_is_made_of_them_is_never_there_whole(name):
    function, *args = PROGRAMS[name]
    with pytest.raises(jo.PlanError) as refused:
        jo.offload(function, memory=1000)(*args)
    least = refused.value.min_device_memory
    made = 8 * ROWS * 4 if name == "regression" else X.nbytes  # x @ w, or what is centered
    assert least < 2 * made if name == "regression" else least < made / 4
    step = jo.offload(function, memory=least)
    for g, w in zip(*map(jax.tree.leaves, (step(*args), jax.jit(function)(*args))), strict=True):
        assert not disagreement(np.asarray(w), np.asarray(g), ulps=4)
    assert step.explain(*args).min_device_memory == least


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_entries_that_are_no_numbers_are_those_of_jit(special):
    """Beside zeros of 63 other pieces."""

    def f(t, h, n):
        logits = jnp.where(jnp.arange(ROWS)[None] % 5 == 0, special, h @ t.T)
        return jnp.take_along_axis(logits, n[:, None], 1)[:, 0]

    words = np.arange(64, dtype=np.int32) * 311
    got = jo.offload(f, device_memory=BUDGET)(HEAD, X[:64], words)
    want = jax.jit(f)(HEAD, X[:64], words)
    assert not np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def epoch(w, x, y):
    """Steps of descent over a data set in batches; the rest of it is left."""
    batches = x[:20_000].reshape(40, 500, COLUMNS), y[:20_000].reshape(40, 500, 8)
    loss = lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2)  # noqa: E731
    return lax.scan(lambda w, b: (w - 0.1 * jax.grad(loss)(w, *b), loss(w, *b)), w, batches)


def test_of_a_data_set_in_batches_each_is_read_where_it_is():
    step = jo.offload(epoch, device_memory="1700KiB")  # three batches
    got, want, exact = step(W, X, Y), jax.jit(epoch)(W, X, Y), in_float64(epoch, (W, X, Y))
    for g, w, e in zip(*map(jax.tree.leaves, (got, want, exact)), strict=True):
        assert not disagreement(np.asarray(w), np.asarray(g), e, ulps=4)
    assert step.last_run.bytes_reloaded < 1.01 * 20_000 * (X.nbytes + Y.nbytes) / ROWS


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("way", ["read", "result", "carried"])
def test_what_is_read_beside_its_batches_is_still_read(way):
    def f(x):
        batches = x.reshape(8, 32, 16)
        total, sums = lax.scan(lambda c, b: (c + b.sum(), b.sum(0)), 0.0, batches)
        if way == "carried":
            return lax.scan(lambda c, b: (c * 0.5 + b, None), batches[0], batches)[0], sums
        return total, sums, (batches if way == "result" else jnp.sin(batches).sum() + x.max())

    x = X[:256, :16].copy()
    for got, want in zip(jo.offload(f, device_memory="40KiB")(x), jax.jit(f)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def random_rows(seed):
    """A program over arrays of as many rows each, or columns, and the arrays that it takes."""
    random = np.random.default_rng(seed)
    count = int(random.choice([24, 37, 130]))
    made = [(count, 6), (count, 6), (6, 5), (6,), (6, count)]
    args = [random.standard_normal(shape).astype(np.float32) for shape in made]
    args.append(random.integers(0, 4, count).astype(np.int32))
    choices = random.integers(0, 1 << 30, (9, 3))

    def function(x, y, w, b, t, number):
        rows, wide, small = [x, y], [t], []
        for kind, i, j in choices:
            u, v = rows[i % len(rows)], rows[j % len(rows)]
            p, q = wide[i % len(wide)], wide[j % len(wide)]
            match kind % 34:
                case 0:
                    rows.append(jnp.tanh(u) + v)
                case 1:
                    rows.append((u @ w) @ w.T / 3)
                case 2:
                    rows.append(u - u.mean(0, keepdims=True))
                case 3:
                    small.append(u.T @ v / count)
                case 4:
                    small.append((u * v).sum(0) + b)
                case 5:
                    rows.append(jax.nn.softmax(u, 1) * b[None])
                case 6:
                    small.append(jnp.zeros((4, 6)).at[number].add(u))
                case 7:
                    rows.append(jnp.where(number[:, None] > 1, u, v[:, ::-1]))
                case 8:
                    rows.append(jnp.sort(u, 1) / (1 + jnp.abs(v.max(0, keepdims=True))))
                case 9:
                    rows.append(u.reshape(count, 2, 3).sum(1) @ w[:3] @ w.T / 4)
                case 10:
                    rows.append(u.astype(jnp.bfloat16).astype(jnp.float32) * v)
                case 11:
                    small.append(w.T @ u.T @ jnp.cos(v) / count)
                case 12:
                    rows.append(jnp.cumsum(u, 1) / 6 + jnp.concatenate([v[:, 3:], u[:, :3]], 1))
                case 13:
                    step = lambda k, z: jnp.tanh(z @ w @ w.T / 3 + u * k)  # noqa: B023, E731
                    rows.append(lax.fori_loop(0, 3, step, v))
                case 14:
                    rows.append(u + jax.random.normal(jax.random.key(i), v.shape, jnp.float32) / 9)
                case 15:
                    step = lambda z, _: (jnp.cos(z) + v / 9, z.mean(0))  # noqa: B023, E731
                    small.append(lax.scan(step, u, None, length=3)[1])
                case 16:
                    small.append(jax.nn.softmax(w.T @ jnp.tanh(u).T, 1) @ v)
                case 17:
                    scores = jax.nn.log_softmax(w.T @ jnp.sin(u * v).T, 1)
                    small.append(jnp.take_along_axis(scores, number[:5, None] * 5, 1))
                case 18:
                    which = jnp.arange(count)[:, None] % 3 == number[0]
                    rows.append(jnp.where(which, u, 0.5 * v))
                case 19:
                    rows.append(((u.T * b[:, None]) / (1 + jnp.abs(v.T).max(1)[:, None])).T)
                case 20:
                    small.append((u * b[None])[number[:7] * 5])
                case 21:
                    rows.append((u + v).at[number[:7] * 5].multiply(b[None]))
                case 22:
                    best, which = lax.top_k(u + v, 3)
                    rows.append(best @ w[:3] @ w.T / 4 + which.mean(1, keepdims=True))
                case 23:
                    small.append(lax.top_k(jnp.round(w.T @ u.T), 6)[0] + lax.top_k(v.T[:5], 6)[0])
                case 24:
                    small.append(u[jnp.argmax(u * v, 0)] + jnp.argmin(jnp.round(v), 0)[None])
                case 25:
                    wide.append(jnp.tanh(p) * b[:, None] + q)
                case 26:
                    wide.append(w @ jax.nn.softmax(w.T @ p, 1) + q)
                case 27:
                    small.append(p @ jnp.sin(q).T / count)
                case 28:
                    rows.append(p.T * b[None] + u)
                case 29:
                    scores = jax.nn.log_softmax(w.T @ jnp.sin(p), 1)
                    small.append(jnp.take_along_axis(scores, number[:5, None] * 5, 1))
                case 30:
                    wide.append(q - 0.1 * p * (v * u).T)
                case 31:
                    rows.append(jnp.cumsum(u, 0) / 9 + lax.cummax(v, 0, reverse=True))
                case 32:
                    wide.append(lax.cumlogsumexp(p, 1) + lax.cummin(q, 1) / 3)
                case 33:
                    small.append(jnp.cumprod(1 + jnp.sin(u) / count, 0, dtype=jnp.float32).sum(0))
        return rows[-1], wide[-1], small

    def gradient(*args):
        def total(x, w, t):
            rows, wide, small = function(x, args[1], w, args[3], t, args[5])
            return jnp.mean(jnp.sin(rows) + wide.T) + sum(jnp.mean(s**2) for s in small)

        return jax.value_and_grad(total, (0, 1, 2))(args[0], args[2], args[4])

    return gradient if seed % 2 else function, args


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(24))
def test_random_programs_in_pieces_are_those_of_jit(seed, monkeypatch):
    """Although they would fit otherwise, and whatever is large."""
    monkeypatch.setattr(loops, "MOST_PIECES", 5)
    monkeypatch.setattr(demand, "_SHORTEST_RUN", 4)
    monkeypatch.setattr(rows_taken, "MIN_BYTES", 64)
    large, plain = demand.Large(64, by_columns=seed % 3 > 0), program.CutProgram.__init__
    monkeypatch.setattr(
        program.CutProgram, "__init__", lambda self, *args: plain(self, *args[:-1], large)
    )
    function, args = random_rows(seed)
    want, exact = jax.jit(function)(*args), in_float64(function, args)
    with pytest.raises(jo.PlanError) as refused:
        jo.offload(function, device_memory=1)(*args)
    least = refused.value.min_device_memory
    for budget in (least, 3 * least // 2):
        policy = jo.policies.random(seed, delays=1e-4)
        got = jo.offload(function, device_memory=budget, cut="always", launch=policy)(*args)
        for g, w, e in zip(*map(jax.tree.leaves, (got, want, exact)), strict=True):
            assert not disagreement(np.asarray(w), np.asarray(g), e, ulps=16)
