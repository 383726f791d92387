"""One dispatch of training: many optimiser steps of a language model over random pieces of a corpus on the device.

Matrices are updated by Muon, everything else (embeddings, norm scales, convolutions, decays) by Adam, both from optax;
master weights are float32. Sequences are cut from the stream of documents at random places; a quarter of them start
where their document does.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from jaxspec.errors import InputError
from jaxspec.models.checkpoint import Config, make_module
from jaxspec.models.corpus import END_OF_TEXT_ID, read_tokens
from jaxspec.models.glm import GlmMTP
from jaxspec.models.glm_config import GlmConfig
from jaxspec.models.hybrid import Hybrid
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.rows import Attend
from jaxspec.models.train_attention import attend_with
from jaxspec.models.train_delta import training_recur

_FROM_DOCUMENT_START = 0.25  # share of the sequences that start at the start of a document


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run does: static, hashable.

    Fields:
      length: T, tokens of a sequence.
      batch: sequences a step.
      steps_a_dispatch: optimiser steps between two looks of the host.
      muon_rate, adam_rate: peak learning rates of the matrices and of everything else.
      weight_decay: of the matrices; a step shrinks them by this times the learning rate.
      clip: largest global norm of the gradient.
      distill_weight: share of a draft's or an MTP block's loss that follows the target's distribution, the rest follows
        the text.
      mtp_weight: factor on the loss of the MTP blocks.
      chain: steps for which one MTP block is trained, the second and further ones on its own rows.
      dense_share: share of the run in which sparse layers attend to everything.
      seed: of the weights and of the order of the text.
    """

    length: int
    batch: int
    steps_a_dispatch: int = 20
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.05
    clip: float = 1.0
    distill_weight: float = 0.0
    mtp_weight: float = 0.3
    chain: int = 2
    dense_share: float = 0.35
    seed: int = 0


@flax.struct.dataclass
class TrainState:
    """Master weights (float32, as `jaxspec.models.save` takes them), the optimiser's state, steps done (int32 [])."""

    params: Any
    optimiser: Any
    step: jax.Array


@flax.struct.dataclass
class Data:
    """The corpus on the device: `tokens` uint16 [N], and `starts` int32 [documents], where each document begins."""

    tokens: jax.Array
    starts: jax.Array


def load_data(corpus: pathlib.Path, length: int) -> Data:
    """Training tokens of a corpus folder."""
    tokens = read_tokens(corpus / "train.tokens.xz")
    if len(tokens) <= length + 1:
        raise InputError(f"{corpus} has {len(tokens)} training tokens: more than {length + 1} are needed, one sequence")
    starts = np.concatenate([[0], np.flatnonzero(tokens[:-1] == END_OF_TEXT_ID) + 1]).astype(np.int32)
    return Data(jnp.asarray(tokens.astype(np.uint16)), jnp.asarray(starts))


def draw(data: Data, key: jax.Array, batch: int, length: int) -> jax.Array:
    """Random sequences int32 [batch, length + 1] of the stream."""
    last = data.tokens.shape[0] - length - 1
    where, whether = jax.random.split(key)
    start = jax.random.randint(where, (batch,), 0, last + 1)
    document = data.starts[jnp.searchsorted(data.starts, start, side="right") - 1]
    snapped = jnp.where(jax.random.uniform(whether, (batch,)) < _FROM_DOCUMENT_START, document, start)
    return data.tokens[snapped[:, None] + jnp.arange(length + 1)].astype(jnp.int32)


@jax.custom_vjp
def wide_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """`hidden [N, H] @ head.T [V, H]` in float32; the products of the backward pass take `hidden`'s narrower dtype."""
    return jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _wide_logits_forward(hidden, head):
    return wide_logits(hidden, head), (hidden, head)


def _wide_logits_backward(saved, gradient):
    hidden, head = saved
    gradient = gradient.astype(hidden.dtype)
    return gradient @ head, gradient.T @ hidden


wide_logits.defvjp(_wide_logits_forward, _wide_logits_backward)


def make_logits(module: Qwen3 | Hybrid, attend: Attend) -> Callable[[Any, jax.Array], jax.Array]:
    """`logits(params, tokens [B, T]) -> float32 [B * T, V]` of whole texts."""

    recur = {"recur": training_recur} if isinstance(module, Hybrid) else {}

    def logits(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        # The module's own logits are not used, hence not computed.
        _, hidden, _ = module.apply(params, tokens, positions, attend, **recur)
        head = params["params"]["embed_tokens"].astype(hidden.dtype)
        return wide_logits(hidden.reshape(-1, hidden.shape[-1]), head)

    return logits


def stack_matrices(params: Any) -> dict[str, jax.Array]:
    """The leaves by shape: equal matrices as one array [count, in, out], so that Muon treats them in one product.

    Embeddings, convolutions, an indexer's slim matrices and vectors keep an entry of their own, called by their path.
    """
    groups: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        groups.setdefault(_group(path, leaf), []).append(leaf)
    return {name: jnp.stack(leaves) if name.startswith("[") else leaves[0] for name, leaves in groups.items()}


def unstack_matrices(stacked: dict[str, jax.Array], like: Any) -> Any:
    """`stack_matrices` undone, in the structure of `like`."""
    taken: dict[str, int] = {}

    def pick(path, leaf):
        name = _group(path, leaf)
        taken[name] = taken.get(name, -1) + 1
        return stacked[name][taken[name]] if name.startswith("[") else stacked[name]

    return jax.tree_util.tree_map_with_path(pick, like)


def _group(path, leaf) -> str:
    name = "/".join(str(entry.key) for entry in path)
    inside = "layer" in name or "blocks" in name
    matrix = leaf.ndim == 2 and inside and not name.endswith(("conv1d", "compress_ape", "weights_proj"))
    return f"[{leaf.shape[0]}, {leaf.shape[1]}]" if matrix else name


def make_optimiser(settings: Settings) -> optax.GradientTransformation:
    """Clipping, then Muon for the layers' matrices and Adam for the rest; learning rates are those at the peak."""
    matrix = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    muon = contrib.muon(
        learning_rate=settings.muon_rate,
        weight_decay=settings.weight_decay,
        adam_learning_rate=settings.adam_rate,
        adam_b1=0.9,
        adam_b2=0.95,
        muon_weight_dimension_numbers=lambda stacked: {n: matrix if n.startswith("[") else None for n in stacked},
    )

    def update(gradients, state, params):
        updates, state = muon.update(stack_matrices(gradients), state, stack_matrices(params))
        return unstack_matrices(updates, gradients), state

    stacked = optax.GradientTransformation(lambda params: muon.init(stack_matrices(params)), update)
    return optax.chain(optax.clip_by_global_norm(settings.clip), stacked)


def init_state(config: Config, settings: Settings) -> TrainState:
    """Fresh weights of the seed; what writes into the residual stream starts small."""
    # Compiled, because the rows that `init` computes beside the weights then fall away.
    params = jax.jit(functools.partial(_fresh, config))(jax.random.key(settings.seed))
    small = (2 * config.num_hidden_layers) ** -0.5

    def shrink(path, leaf):
        return leaf * small if path[-1].key in ("o_proj", "out_proj", "down_proj") else leaf

    params = jax.tree_util.tree_map_with_path(shrink, params)
    return TrainState(params, make_optimiser(settings).init(params), jnp.zeros((), jnp.int32))


def _fresh(config, key):
    tokens = jnp.zeros((1, 1), jnp.int32)
    if not isinstance(config, GlmConfig):
        return make_module(config).init(key, tokens, tokens, attend_with(config.windows, "blocks", "blocks"))

    def attend(layer, q, k, v, index, cache, *, scale):
        return q, cache

    params = make_module(config).init(key, tokens, tokens, attend)
    embedding, hidden = params["params"]["embed_tokens"], jnp.zeros((1, 1, config.hidden_size))
    blocks = {}
    for depth in range(config.num_nextn_predict_layers):
        block, own = GlmMTP(config, depth=depth), jax.random.fold_in(key, depth)
        blocks[f"blocks_{depth}"] = block.init(own, embedding, embedding, tokens, hidden, attend)["params"]
    return {**params, "mtp": blocks} if blocks else params


def make_dispatch(
    logits: Callable[[Any, jax.Array], jax.Array],
    teacher: Callable[[Any, jax.Array], jax.Array] | None,
    settings: Settings,
) -> Callable[[TrainState, Any, Data, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """The dispatch of a language model: `run_steps` with the cross-entropy with the text, and with a teacher."""

    def loss(params, teacher_params, sequences, control):
        tokens, labels = sequences[:, :-1], sequences[:, 1:].reshape(-1)
        scores = logits(params, tokens)
        total = jax.nn.logsumexp(scores, axis=-1)
        picked = jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0]
        nats = jnp.mean(total - picked)
        if teacher is None:
            return nats, {"nats": nats}
        wanted = jax.nn.softmax(jax.lax.stop_gradient(teacher(teacher_params, tokens)), axis=-1)
        soft = jnp.mean(total - jnp.sum(wanted * scores, axis=-1))
        return (1 - settings.distill_weight) * nats + settings.distill_weight * soft, {"nats": nats}

    return run_steps(loss, settings)


def run_steps(
    loss: Callable[[Any, Any, jax.Array, dict[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]],
    settings: Settings,
) -> Callable[[TrainState, Any, Data, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted `dispatch(state, teacher_params, data, control) -> (state, figures)`, K optimiser steps.

    Args:
      loss: `loss(params, teacher_params, sequences int32 [batch, length + 1], control) -> (loss, figures)`.
      settings: of the run.

    Returns:
      The function. Every array of `control` has an axis K in front, and each step gets its own: `rate`, the share of
      the peak learning rate, and whatever the loss looks at. Figures are scalars of each step, [K], among them `nats`,
      the mean cross-entropy with the text, in nats a token. `state` is donated.
    """
    optimiser = make_optimiser(settings)

    @functools.partial(jax.jit, donate_argnums=0)
    def dispatch(state, teacher_params, data, control):
        def one(state, control):
            key = jax.random.fold_in(jax.random.key(settings.seed + 1), state.step)
            sequences = draw(data, key, settings.batch, settings.length)
            gradients, figures = jax.grad(loss, has_aux=True)(state.params, teacher_params, sequences, control)
            updates, inner = optimiser.update(gradients, state.optimiser, state.params)
            params = jax.tree.map(lambda p, u: p + control["rate"] * u, state.params, updates)
            return TrainState(params, inner, state.step + 1), figures

        return jax.lax.scan(one, state, control)

    return dispatch
