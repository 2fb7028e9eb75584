"""Every architecture of models/ once more, in numpy and float64, straight from the formulas.

No cache, no fusion, nothing of qrun: the whole text at once, one loop over layers. `planned` is the
length that dynamic and longrope look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Config = Mapping[str, Any]
Tensors = Mapping[str, Array]


def logits_of(c: Config, t: Tensors, ids: list[int], planned: int) -> Array:
    """ids (L,) -> logits (L, V) of every position."""
    kind, k = c["model_type"], c["hidden_size"]
    gemma = kind.startswith("gemma")
    tied = c.get("tie_word_embeddings", gemma or kind in ("cohere2", "smollm3"))

    def norm(x: Array, name: str) -> Array:
        w = t[f"{name}.weight"] + (1 if gemma else 0)
        if kind == "cohere2":
            x = x - x.mean(-1, keepdims=True)
        eps = c["layer_norm_eps"] if kind == "cohere2" else c["rms_norm_eps"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w

    x = t["model.embed_tokens.weight"][ids] * c.get("embedding_multiplier", 1.0)
    if gemma:
        x = x * bfloat16(math.sqrt(k))
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        multiplier = c.get("residual_multiplier", 1.0)
        if kind == "cohere2":
            h = norm(x, f"{at}.input_layernorm")
            x = x + attention(c, t, i, h, norm, planned) + mlp(c, t, f"{at}.mlp", h)
        elif kind == "olmo2":
            x = x + norm(attention(c, t, i, x, norm, planned), f"{at}.post_attention_layernorm")
            x = x + norm(mlp(c, t, f"{at}.mlp", x), f"{at}.post_feedforward_layernorm")
        elif gemma:
            y = attention(c, t, i, norm(x, f"{at}.input_layernorm"), norm, planned)
            x = x + norm(y, f"{at}.post_attention_layernorm")
            y = mlp(c, t, f"{at}.mlp", norm(x, f"{at}.pre_feedforward_layernorm"))
            x = x + norm(y, f"{at}.post_feedforward_layernorm")
        else:
            y = attention(c, t, i, norm(x, f"{at}.input_layernorm"), norm, planned)
            x = x + y * multiplier
            h = norm(x, f"{at}.post_attention_layernorm")
            if kind == "mixtral":
                y = mixture(t, f"{at}.block_sparse_moe", h, c["num_experts_per_tok"], True)
            elif f"{at}.mlp.gate.weight" in t:
                y = mixture(t, f"{at}.mlp", h, c["num_experts_per_tok"], c["norm_topk_prob"])
            else:
                y = mlp(c, t, f"{at}.mlp", h)
            x = x + y * multiplier
    head = t["model.embed_tokens.weight" if tied else "lm_head.weight"]
    y = norm(x, "model.norm") @ head.T * c.get("logit_scale", 1.0) / c.get("logits_scaling", 1.0)
    cap = c.get("final_logit_softcapping")
    return cap * np.tanh(y / cap) if cap else y


def attention(
    c: Config, t: Tensors, i: int, h: Array, norm: Callable[[Array, str], Array], planned: int
) -> Array:
    kind, length = c["model_type"], len(h)
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or c["hidden_size"] // heads
    at = f"model.layers.{i}.self_attn"
    if kind == "phi3":
        q, k, v = np.split(h @ t[f"{at}.qkv_proj.weight"].T, [heads * d, (heads + kv_heads) * d], 1)
    else:
        q, k, v = (linear(t, f"{at}.{name}_proj", h) for name in "qkv")
    if kind == "olmo2":
        q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
    q, k, v = (y.reshape(length, -1, d).swapaxes(0, 1) for y in (q, k, v))
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
    if rotates(c, i):
        inv_freq, factor = frequencies(c, d, sliding(c, i), planned)
        q, k = (rotated(y, inv_freq, factor, pairs=kind == "cohere2") for y in (q, k))
    scale = d**-0.5
    if kind.startswith("gemma"):
        scale = c["query_pre_attn_scalar"] ** -0.5
    scale = c.get("attention_multiplier", scale)
    k, v = (np.repeat(y, heads // kv_heads, axis=0) for y in (k, v))
    scores = q @ k.swapaxes(1, 2) * scale
    cap = c.get("attn_logit_softcapping")
    if cap:
        scores = cap * np.tanh(scores / cap)
    past = np.arange(length)[:, None] - np.arange(length)
    seen = (past >= 0) & (past < c["sliding_window"] if sliding(c, i) else True)
    p = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(-1, keepdims=True)), 0)
    y = (p / p.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(length, -1)
    return linear(t, f"{at}.o_proj", y)


def sliding(c: Config, i: int) -> bool:
    kind = c["model_type"]
    if "layer_types" in c:
        return c["layer_types"][i] == "sliding_attention"
    if kind == "gemma2":
        return i % 2 == 0
    if kind in ("gemma3_text", "cohere2"):
        return (i + 1) % c["sliding_window_pattern"] != 0
    if kind.startswith("qwen"):
        return c.get("use_sliding_window", False) and i >= c["max_window_layers"]
    return kind in ("mistral", "mixtral", "phi3") and bool(c.get("sliding_window"))


def rotates(c: Config, i: int) -> bool:
    if c["model_type"] == "cohere2":
        return sliding(c, i)
    if c["model_type"] == "smollm3":
        return bool(c["no_rope_layers"][i]) if "no_rope_layers" in c else (i + 1) % 4 != 0
    return True


def frequencies(c: Config, d: int, local: bool, planned: int) -> tuple[Array, float]:
    """inv_freq (R/2,) and the factor on cosines and sines."""
    rule = dict(c.get("rope_scaling") or {})
    theta = c.get("rope_theta", 10000.0)
    if "rope_parameters" in c:
        rule = dict(c["rope_parameters"])
        if "full_attention" in rule:
            rule = rule["sliding_attention" if local else "full_attention"]
        theta = rule["rope_theta"]
    elif c["model_type"] == "gemma3_text" and local:
        rule, theta = {}, c["rope_local_base_freq"]
    r = int(d * c.get("partial_rotary_factor", 1.0))
    longest = c["max_position_embeddings"]
    original = c.get("original_max_position_embeddings")
    original = original or rule.get("original_max_position_embeddings") or longest
    kind = rule.get("rope_type", rule.get("type", "default"))
    exponents = np.arange(0, r, 2) / r
    freq, factor = theta**-exponents, rule.get("factor", 1.0)
    if kind == "default":
        return freq, 1.0
    if kind == "linear":
        return freq / factor, 1.0
    if kind == "dynamic":
        if planned > original:
            theta *= (factor * planned / original - (factor - 1)) ** (r / (r - 2))
        return theta**-exponents, 1.0
    if kind == "longrope":
        scale = np.array(rule["long_factor" if planned > original else "short_factor"])
        grown = longest / original
        return freq / scale, math.sqrt(1 + math.log(grown) / math.log(original))
    found = []
    if kind == "llama3":
        low, high = rule["low_freq_factor"], rule["high_freq_factor"]
        for f in freq:
            wave = 2 * math.pi / f
            smooth = (original / wave - low) / (high - low)
            if wave < original / high:
                found.append(f)
            elif wave > original / low:
                found.append(f / factor)
            else:
                found.append((1 - smooth) * f / factor + smooth * f)
        return np.array(found), 1.0
    assert kind == "yarn"

    def pair(turns: float) -> float:
        return r * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), r - 1)
    for j, f in enumerate(freq):
        ramp = min(max((j - low) / (high - low), 0), 1)
        found.append(f / factor * ramp + f * (1 - ramp))
    return np.array(found), 0.1 * math.log(factor) + 1


def rotated(x: Array, inv_freq: Array, factor: float, *, pairs: bool) -> Array:
    """x (H, L, D); pairs: dims 2i and 2i+1 belong together, else i and i + R/2."""
    half = len(inv_freq)
    turn = np.exp(1j * np.arange(x.shape[1])[:, None] * inv_freq) * factor
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half : 2 * half])
    z = (a + 1j * b) * turn
    if pairs:
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)


def linear(t: Tensors, name: str, h: Array) -> Array:
    return h @ t[f"{name}.weight"].T + t.get(f"{name}.bias", np.zeros(1))


def mlp(c: Config, t: Tensors, at: str, h: Array) -> Array:
    if f"{at}.gate_up_proj.weight" in t:
        gate, up = np.split(h @ t[f"{at}.gate_up_proj.weight"].T, 2, axis=1)
    else:
        gate, up = linear(t, f"{at}.gate_proj", h), linear(t, f"{at}.up_proj", h)
    if c["model_type"].startswith("gemma"):
        root = math.sqrt(2 / math.pi)
        gate = 0.5 * gate * (1 + np.tanh(root * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    return linear(t, f"{at}.down_proj", gate * up)


def mixture(t: Tensors, at: str, h: Array, top: int, renormalize: bool) -> Array:
    logits = h @ t[f"{at}.gate.weight"].T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = np.zeros_like(h)
    for row, (x, share) in enumerate(zip(h, p, strict=True)):
        chosen = np.argsort(-share)[:top]
        whole = share[chosen].sum() if renormalize else 1.0
        for e in chosen:
            gate, up, down = expert(t, at, int(e))
            g = gate @ x
            y[row] += share[e] / whole * (down @ (g / (1 + np.exp(-g)) * (up @ x)))
    return y


def expert(t: Tensors, at: str, e: int) -> list[Array]:
    """gate, up and down of expert e, in whichever way they are stored."""
    if f"{at}.switch_mlp.up_proj.weight" in t:
        names = [f"{n}_proj" for n in ("gate", "up", "down")]
        return [t[f"{at}.switch_mlp.{n}.weight"][e] for n in names]
    old = f"{at}.experts.{e}.w1.weight" in t
    names = ["w1", "w3", "w2"] if old else ["gate_proj", "up_proj", "down_proj"]
    return [t[f"{at}.experts.{e}.{n}.weight"] for n in names]


def bfloat16(value: float) -> float:
    """Rounded to 8 bits of mantissa, ties to even."""
    exponent = math.floor(math.log2(value))
    return round(value * 2 ** (7 - exponent)) / 2 ** (7 - exponent)


def unpacked(stored: Mapping[str, tuple[str, npt.NDArray[Any]]], spec: Any) -> dict[str, Array]:
    """Stored tensors as float64; quantized ones dequantized in float64 according to `spec`.

    spec: object with bits, group_size, mode, as qrun.quantization.Quantization.
    """
    from qrun.quantization import dequantize_ref

    def real(kind: str, array: npt.NDArray[Any]) -> Any:
        if kind == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return array if kind == "U8" else array.astype(np.float64)

    found: dict[str, Array] = {}
    for name, (kind, array) in stored.items():
        path = name.removesuffix(".weight")
        if kind == "U32":
            lead = array.shape[:-1]
            flat = array.reshape(-1, array.shape[-1])
            scales = real(*stored[f"{path}.scales"]).reshape(len(flat), -1)
            biases = None
            if f"{path}.biases" in stored:
                biases = real(*stored[f"{path}.biases"]).reshape(len(flat), -1)
            found[name] = dequantize_ref(flat, scales, biases, spec).reshape(*lead, -1)
        elif not name.endswith((".scales", ".biases")):
            found[name] = real(kind, array)
    return found
