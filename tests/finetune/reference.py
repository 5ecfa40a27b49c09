"""Decoder models in NumPy and float64, one sequence at a time and with loops: an oracle.

Written from the papers and Hugging Face's configs, sharing nothing with the package but the names
of the weights.
"""

import math

import numpy as np


def array(params, *path):
    for part in path:
        params = params[part]
    return np.asarray(params, np.float64)


def turning_rates(rope, half, length):
    """Radians a token, element by element."""
    found = []
    theta = rope.theta
    if rope.kind == "dynamic" and length > rope.original_length:
        stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
        theta *= stretch ** (2 * half / (2 * half - 2))
    for i in range(half):
        rate = theta ** (-i / half)
        wave = 2 * math.pi / rate
        if rope.kind == "linear":
            rate /= rope.factor
        elif rope.kind == "llama3":
            long = rope.original_length / rope.low_freq_factor
            short = rope.original_length / rope.high_freq_factor
            if wave > long:
                rate /= rope.factor
            elif wave > short:
                smooth = (rope.original_length / wave - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                rate = (1 - smooth) * rate / rope.factor + smooth * rate
        elif rope.kind == "yarn":
            ends = []
            for beta in (rope.beta_fast, rope.beta_slow):
                turns = math.log(rope.original_length / (beta * 2 * math.pi))
                ends.append(half * turns / math.log(theta))
            low, high = ends
            if rope.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, 2 * half - 1)
            if low == high:
                high += 0.001
            ramp = min(max((i - low) / (high - low), 0), 1)
            rate = ramp * rate / rope.factor + (1 - ramp) * rate
        found.append(rate)
    return found


def vector_length(rope):
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def grown(m):
        return 1.0 if rope.factor <= 1 else 0.1 * m * math.log(rope.factor) + 1

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1)


def turned(v, rope):
    """(T, D) with the token's number as its position."""
    length, d = v.shape
    half = d // 2
    rates, size = turning_rates(rope, half, length), vector_length(rope)
    out = np.empty_like(v)
    for t in range(length):
        for i in range(half):
            a, b = v[t, i], v[t, i + half]
            c, s = math.cos(t * rates[i]) * size, math.sin(t * rates[i]) * size
            out[t, i], out[t, i + half] = a * c - b * s, b * c + a * s
    return out


def activated(kind, x):
    if kind == "silu":
        return x / (1 + np.exp(-x))
    assert kind == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(config, params, tokens):
    """(T,) tokens to (T, V) float64."""
    length, d = len(tokens), config.head_width
    group = config.num_heads // config.num_kv_heads

    def norm(v, scale):
        scale = 1 + scale if config.norm_adds_one else scale
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + config.norm_eps) * scale

    score_scale = config.query_scale or d**-0.5
    table = array(params, "model", "embed_tokens", "weight")
    x = table[tokens] * config.embedding_scale
    for n in range(config.num_layers):
        stack = params["model"]["layers"]

        def own(*path, stack=stack, n=n):
            return array(stack, *path)[n]

        def linear(v, *path, own=own, stack=stack):
            inner = stack
            for part in path:
                inner = inner[part]
            out = v @ own(*path, "weight").T
            return out + own(*path, "bias") if "bias" in inner else out

        slides = config.window is not None and (not config.sliding or config.sliding[n])
        rope = config.sliding_rope if slides and config.sliding_rope else config.rope
        h = norm(x, own("input_layernorm", "weight"))
        q, k, v = (linear(h, "self_attn", f"{c}_proj") for c in "qkv")
        heads = []
        for head in range(config.num_heads):
            kv = head // group * d
            one_q, one_k = q[:, head * d : head * d + d], k[:, kv : kv + d]
            if config.has_qk_norm:
                one_q = norm(one_q, own("self_attn", "q_norm", "weight"))
                one_k = norm(one_k, own("self_attn", "k_norm", "weight"))
            scores = turned(one_q, rope) @ turned(one_k, rope).T * score_scale
            for i in range(length):
                for j in range(length):
                    if j > i or (slides and i - j >= config.window):
                        scores[i, j] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv : kv + d])
        h = linear(np.concatenate(heads, -1), "self_attn", "o_proj")
        after = own("post_attention_layernorm", "weight")
        if config.has_sandwich_norms:
            x = x + norm(h, after)
            after = own("pre_feedforward_layernorm", "weight")
        else:
            x = x + h
        h = norm(x, after)
        gate = activated(config.activation, linear(h, "mlp", "gate_proj"))
        h = linear(gate * linear(h, "mlp", "up_proj"), "mlp", "down_proj")
        if config.has_sandwich_norms:
            h = norm(h, own("post_feedforward_layernorm", "weight"))
        x = x + h
    x = norm(x, array(params, "model", "norm", "weight"))
    return x @ (table if config.is_tied else array(params, "lm_head", "weight")).T
