"""A Qwen3 dense model in plain PyTorch with a static K/V cache: what a step of the rival's decode loop computes.

Nothing here is written for this comparison to come out well for us. Projections that read the same rows are one matrix,
the residual is added by the product that ends a block, and all query heads of a K/V head are rows of one attention, so
that keys are read once. The scales of query and key norm lie in the rotary tables: with `roll` the exchange of a head's
two halves and s = (-sin, sin),

    rotate(w * n) = w * cos * n + roll(w) * s * roll(n)

so a table of w * cos and one of roll(w) * s, a row a position, take norm scale and rotation in two operations.

Source: "Qwen3 Technical Report" (arXiv 2505.09388).
"""

import contextlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ALIGN = 16  # positions; attention takes masks of other lengths only after it has copied them
# Who computes attention: one kernel chosen by torch or one that is named, or products and a softmax ("math").
ATTENTIONS = {
    "torch's choice": None,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors, or of its shards."""
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file():
        files = sorted(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


class StaticQwen3:
    """Weights, tables, caches and the numbers of B requests, all of them on the device and of fixed shape.

    Args:
      shape: a `Qwen3Config` as a dict.
      tensors: by their public names.
      dtype: torch.float32 or torch.bfloat16; norms compute in float32 inside either way.
      device: "cuda" or "cpu".
      batch: B.
      length: positions of the cache, rounded up to 16.
      new: tokens a request that `out` has room for.
      attention: of ATTENTIONS.

    Attributes:
      token: int64 [B], the newest token, which the next step feeds in.
      position: int64 [B], its place in the text.
      count: int64 [1], tokens in `out`.
      out: int64 [B, new], what was emitted.
    """

    def __init__(self, shape, tensors, *, dtype, device, batch, length, new, attention):
        self.shape, self.dtype, self.batch, self.attention = shape, dtype, batch, attention
        self.heads, self.kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.head_dim, self.eps = shape["head_dim"], shape["rms_norm_eps"]
        self.length = -(-length // ALIGN) * ALIGN

        def take(name):
            return tensors[name].to(device, dtype)

        self.embedding = take("model.embed_tokens.weight")
        self.head = self.embedding if shape["tie_word_embeddings"] else take("lm_head.weight")
        self.final_norm = take("model.norm.weight")
        self.layers = []
        for layer in range(shape["num_hidden_layers"]):

            def of(*names, layer=layer):
                return torch.cat([take(f"model.layers.{layer}.{name}.weight") for name in names])

            self.layers.append(
                {
                    "attention_norm": of("input_layernorm"),
                    "qkv": of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj").t(),
                    "o": of("self_attn.o_proj").t(),
                    "mlp_norm": of("post_attention_layernorm"),
                    "gate_up": of("mlp.gate_proj", "mlp.up_proj").t(),
                    "down": of("mlp.down_proj").t(),
                }
            )
        self.cos, self.sin = self._tables(take)
        size = (batch, self.kv_heads, self.length, self.head_dim)
        self.caches = [[torch.zeros(size, dtype=dtype, device=device) for _ in range(2)] for _ in self.layers]
        self.token, self.position = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(batch, new, dtype=torch.int64, device=device)
        self.keys = torch.arange(self.length, device=device)
        self.rows = torch.arange(batch, device=device)[:, None]
        self.head_rows = torch.arange(self.kv_heads, device=device)[None]
        self.seen, self.hidden = (torch.full((), value, dtype=dtype, device=device) for value in (0, float("-inf")))
        self.wide_logits = dtype == torch.bfloat16 and device == "cuda" and self._has_wide_products()

    def _tables(self, take):
        """[length, layers, query and key heads, head_dim] each."""
        half = self.head_dim // 2
        frequency = 1 / self.shape["rope_theta"] ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(self.length).float()[:, None] * frequency
        cos, sin = torch.cos(angles).repeat(1, 2), torch.cat([-torch.sin(angles), torch.sin(angles)], dim=1)
        scales = [
            torch.cat(
                [
                    take(f"model.layers.{layer}.self_attn.{name}_norm.weight").float().expand(heads, -1)
                    for name, heads in (("q", self.heads), ("k", self.kv_heads))
                ]
            )
            for layer in range(len(self.layers))
        ]
        scale = torch.stack(scales)
        cos, sin = (table.to(scale.device)[:, None, None] for table in (cos, sin))
        return (cos * scale).to(self.dtype), (sin * scale.roll(half, -1)).to(self.dtype)

    def _has_wide_products(self) -> bool:
        """Whether torch can leave the sums of a bfloat16 product in float32, as logits are wanted."""
        try:
            torch.mm(self.embedding[:1], self.head.t(), out_dtype=torch.float32)
        except (TypeError, RuntimeError):
            return False
        return True

    def _forward(self, x, lead, cos, sin, attend):
        """The residual stream [N, H] after all layers, normed; the N rows are [B] or [B, P], as `lead` says.

        `attend(layer, q, k, v)` takes [*lead, heads, head_dim] and returns rows [N, heads * head_dim]; cos and sin are
        [B or P, layers, heads, head_dim], the P rows being shared by all requests.
        """
        turned = self.heads + self.kv_heads
        size = (self.head_dim,)
        for number, layer in enumerate(self.layers):
            normed = functional.rms_norm(x, (x.shape[1],), layer["attention_norm"], self.eps)
            qkv = (normed @ layer["qkv"]).view(*lead, turned + self.kv_heads, self.head_dim)
            # The values go along: a slice without them would be copied before it is normed.
            qk = functional.rms_norm(qkv, size, eps=self.eps)[..., :turned, :]
            layer_cos, layer_sin = cos[..., number, :, :], sin[..., number, :, :]
            qk = torch.addcmul(qk * layer_cos, qk.roll(self.head_dim // 2, -1), layer_sin)
            out = attend(number, qk[..., : self.heads, :], qk[..., self.heads :, :], qkv[..., turned:, :])
            x.addmm_(out, layer["o"])
            normed = functional.rms_norm(x, (x.shape[1],), layer["mlp_norm"], self.eps)
            gate, up = (normed @ layer["gate_up"]).chunk(2, -1)
            x.addmm_(functional.silu(gate) * up, layer["down"])
        return functional.rms_norm(x, (x.shape[1],), self.final_norm, self.eps)

    def _next(self, rows):
        """The most likely token [B] after the rows [B, H]."""
        if self.wide_logits:
            return torch.mm(rows, self.head.t(), out_dtype=torch.float32).argmax(-1)
        return (rows @ self.head.t()).argmax(-1)

    def _kernel(self):
        backend = ATTENTIONS[self.attention]
        return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)

    def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Begins anew: fills the caches from prompts int64 [B, P] of the given lengths [B] and emits a token each.

        What the rows behind a prompt write lies where the next tokens will, and no query sees it before they do.
        """
        padded = tokens.shape[1]
        query, key = self.keys[:padded, None], self.keys[None, :padded]
        masks = {}
        for window in set(self.shape["windows"]):
            masks[window] = (key <= query) if window is None else (key <= query) & (key > query - window)
        group = self.heads // self.kv_heads

        def attend(layer, q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            for cache, new in zip(self.caches[layer], (k, v), strict=True):
                cache[:, :, :padded] = new
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            mask = masks[self.shape["windows"][layer]]
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.transpose(1, 2).reshape(self.batch * padded, -1)

        with sdpa_kernel(SDPBackend.MATH) if self.dtype == torch.float32 else contextlib.nullcontext():
            x = functional.embedding(tokens.flatten(), self.embedding)
            hidden = self._forward(x, tokens.shape, self.cos[:padded], self.sin[:padded], attend)
        last = hidden.view(self.batch, padded, -1)[self.rows[:, 0], lengths - 1]
        self.token.copy_(self._next(last))
        self.position.copy_(lengths)
        self.count.fill_(1)
        self.out[:, 0] = self.token

    def step(self) -> None:
        """Feeds the newest tokens in and emits the next ones. Reads and writes the device alone: can be captured."""
        masks = {}
        behind = self.position[:, None] - self.keys  # [B, length], how far behind the query a key lies
        for window in set(self.shape["windows"]):
            hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
            masks[window] = torch.where(hidden, self.hidden, self.seen)[:, None, None]
        cos, sin = self.cos.index_select(0, self.position), self.sin.index_select(0, self.position)
        cells = self.rows, self.head_rows, self.position[:, None]

        def attend(layer, q, k, v):
            cache = self.caches[layer]
            for values, new in zip(cache, (k, v), strict=True):
                values.index_put_(cells, new)
            q = q.unflatten(1, (self.kv_heads, -1))  # the heads that share keys are rows of one product
            mask = masks[self.shape["windows"][layer]]
            out = functional.scaled_dot_product_attention(q, *cache, attn_mask=mask)
            return out.reshape(self.batch, -1)

        with self._kernel():
            x = functional.embedding(self.token, self.embedding)
            hidden = self._forward(x, self.token.shape, cos, sin, attend)
        self.token.copy_(self._next(hidden))
        self.position.add_(1)
        self.out.index_copy_(1, self.count, self.token[:, None])
        self.count.add_(1)
