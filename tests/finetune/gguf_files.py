"""Files as llama.cpp's converter writes them: its names, its order of rows, its norms.

Shares nothing with the package but Hugging Face's names of the weights.
"""

import numpy as np

ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}  # fmt: skip
PERCEPTRON = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def interleaved(array, heads):
    """Rows of each head in pairs (0, D/2), (1, D/2 + 1), ... as LLaMA's files have them."""
    rows = len(array)
    width = rows // heads
    order = [
        head * width + half * (width // 2) + i
        for head in range(heads)
        for i in range(width // 2)
        for half in (0, 1)
    ]
    assert sorted(order) == list(range(rows))
    return array[order]


def tensors_of(architecture, params, heads, kv_heads):
    """Each tensor's name and its elements."""
    is_gemma = architecture == "gemma3"
    one = np.float32(1 if is_gemma else 0)
    outer = params["model"]
    yield "token_embd.weight", outer["embed_tokens"]["weight"]
    yield "output_norm.weight", outer["norm"]["weight"] + one
    if "lm_head" in params:
        yield "output.weight", params["lm_head"]["weight"]
    layers = outer["layers"]
    for i in range(len(layers["input_layernorm"]["weight"])):
        for part, names in (("self_attn", ATTENTION), ("mlp", PERCEPTRON)):
            for theirs, name in names.items():
                for last, stack in layers[part].get(theirs, {}).items():
                    array = stack[i]
                    count = {"q_proj": heads, "k_proj": kv_heads}.get(theirs)
                    if count and architecture == "llama":
                        array = interleaved(array, count)
                    if theirs.endswith("norm"):
                        array = array + one
                    yield f"blk.{i}.{name}.{last}", array
        for theirs, name in (GEMMA_NORMS if is_gemma else NORMS).items():
            yield f"blk.{i}.{name}.weight", layers[theirs]["weight"][i] + one


def llama3_factors(half, theta, factor, original, low=1.0, high=4.0):
    """What Llama 3's rates are divided by, one after another in float32's places."""
    found = []
    for i in range(half):
        wave = 2 * np.pi * theta ** (i / half)
        if wave < original / high:
            found.append(1.0)
        elif wave > original / low:
            found.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def write(package, path, architecture, values, tokenizer, tensors):
    """A file.

    Args:
      values: metadata under the architecture's name: int, float, str or list of bool.
      tokenizer: metadata under "tokenizer.ggml.".
      tensors: names and elements.
    """
    writer = package.GGUFWriter(path, architecture)
    for prefix, named in ((architecture, values), ("tokenizer.ggml", tokenizer)):
        for name, value in named.items():
            name = f"{prefix}.{name}"
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_array(name, value)
    for name, array in tensors:
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
