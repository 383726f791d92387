"""The state of a batch on the device.

A jitted call costs host time for each leaf of its state, so the state has few: the KV buffers, the page tables, the
token history, the log of rounds and one packed int32 array that holds every per-request number. Inside the step
`requests_of` opens it as a dataclass, and `SpecState.with_` packs it again; XLA sees slices and one concatenation.

Request rows: row 0 is the sink row, row b + 1 belongs to batch lane b.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, Pages, PoolCache, UnifiedPages
from jaxspec.config import SpecConfig
from jaxspec.drafting import Drafter
from jaxspec.errors import InputError
from jaxspec.metadata import verify_layout
from jaxspec.models.contract import Model
from jaxspec.steps.fusion import kpool_of
from jaxspec.steps.memory import init_memory, pool_layout, smallest_pool
from jaxspec.steps.settings import pack_settings
from jaxspec.verification.stop_strings import StopStrings
from jaxspec.verification.stopping import CONTEXT, INVALID, LENGTH, STOP, STOP_STRING, UNFINISHED, StopMatcher
from pallas_kernels import PackedMetadata

Array = jax.Array

EMPTY, WAITING, RUNNING, FINISHED = range(4)  # Requests.status
FINISH_NAMES = {
    UNFINISHED: None,
    STOP: "stop",
    LENGTH: "length",
    CONTEXT: "context",
    STOP_STRING: "stop_string",
    INVALID: "invalid_token",
}


@flax.struct.dataclass
class Requests:
    """The numbers of each request row, int32[R] each.

    Attributes:
      status: EMPTY, WAITING (prompt not yet in the cache), RUNNING or FINISHED.
      finish_reason: UNFINISHED, STOP (a stop id), LENGTH (max_new_tokens), CONTEXT (context_len), STOP_STRING or
        INVALID (an id outside the vocabulary).
      prompt_len: tokens of the prompt.
      seq_len: committed tokens L, whose K and V are in the cache. While RUNNING the newest token (the anchor) is at
        position L.
      num_output: tokens emitted so far.
      max_new_tokens: tokens the request may emit.
      verify_count: rounds the request took part in.
    """

    status: Array
    finish_reason: Array
    prompt_len: Array
    seq_len: Array
    num_output: Array
    max_new_tokens: Array
    verify_count: Array


_REQUEST_FIELDS = tuple(field.name for field in dataclasses.fields(Requests))


@flax.struct.dataclass
class SpecState:
    """Everything a round reads and writes besides the weights. R request rows, P pages a row, T = context_len.

    Attributes:
      cache: the target's K, V and states.
      draft: the drafter's own state.
      pages: who owns which page.
      tokens: int32[R, T], prompt and emitted tokens.
      stop_ids: int32[R, S], ids that end a request, -1 where unused.
      round_log: int32[R, M, 2], for each round of a request: accepted drafts, and tokens emitted after stop and length
        limits.
      logprobs: float32[R, T], log-probability of the emitted token at each position; None unless asked for.
      packed: int32[7, R], the fields of `Requests`.
      metadata: the buffer that each round's metadata is written to.
      settings: int32[4, R], how each request samples, see `jaxspec.steps.settings`; None if all are greedy.
      stops: what finds stop strings; None if no request has one.
    """

    cache: KVCache | PoolCache
    draft: Any
    pages: Pages | UnifiedPages
    tokens: Array
    stop_ids: Array
    round_log: Array
    logprobs: Array | None
    packed: Array
    metadata: PackedMetadata
    settings: Array | None = None
    stops: StopMatcher | None = None

    def with_(self, *, requests: Requests, **parts) -> "SpecState":
        """The state with opened requests packed again and other parts replaced."""
        return self.replace(packed=jnp.stack([getattr(requests, name) for name in _REQUEST_FIELDS]), **parts)


def lanes_to_rows(lanes: Array) -> Array:
    """int32[B], a number a lane -> int32[R], the same by request row, with 0 for the sink row."""
    return jnp.pad(lanes, (1, 0))


def requests_of(state: SpecState) -> Requests:
    """The per-request numbers of a state."""
    return Requests(**{name: state.packed[i] for i, name in enumerate(_REQUEST_FIELDS)})


def check_requests(
    target: Model, drafter: Drafter | None, config: SpecConfig, prompts: Sequence[np.ndarray], limits: Sequence[int]
) -> None:
    """Raises InputError unless each of the prompts, with its limit of new tokens, can be completed on its own."""
    layout = pool_layout(target, drafter, config) if config.memory == "unified" else None
    if config.context_len > target.context_len:
        raise InputError(f"context_len={config.context_len} is more than the model's {target.context_len}")
    if len(limits) != len(prompts):
        raise InputError(
            f"{len(limits)} values of max_new_tokens for {len(prompts)} prompts: give one number or one each"
        )
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if prompt.ndim != 1 or (not np.issubdtype(prompt.dtype, np.integer) and prompt.size):
            raise InputError(
                f"prompt {i}: expected a sequence of token ids, got shape {prompt.shape} of {prompt.dtype}"
            )
        if prompt.size == 0:
            raise InputError(f"prompt {i} is empty: give at least one token")
        if prompt.size >= config.context_len:
            raise InputError(
                f"prompt {i} has {prompt.size} tokens; context_len={config.context_len} leaves room for "
                f"{config.context_len - 1} and one new token: shorten it or raise context_len"
            )
        bad = prompt[(prompt < 0) | (prompt >= target.vocab_size)]
        if bad.size:
            raise InputError(f"prompt {i} holds token id {bad[0]}, outside 0 .. {target.vocab_size - 1}")
        if not 0 <= limit <= config.max_new_tokens:
            raise InputError(
                f"prompt {i}: max_new_tokens={limit}, outside 0 .. {config.max_new_tokens} of the configuration"
            )
        # The last round starts at length prompt + limit - 2; a request that wants one token at most sees no round.
        reach = prompt.size if limit <= 1 else prompt.size + limit - 2 + config.num_draft_tokens
        reach = min(reach, config.context_len)
        pages = -(-reach // config.page_size)
        if layout is not None:
            swa = 0 if target.swa_window is None else min(pages, config.swa_pages_per_row(target.swa_window))
            if not layout.holds(full=pages, swa=swa, state=int(target.has_state)):
                needed = smallest_pool(target, drafter, config, full=pages, swa=swa, state=1).nbytes
                way_out = f"pool_bytes to at least {needed}" if config.pool_bytes else "num_pages and num_swa_pages"
                raise InputError(
                    f"prompt {i} needs {pages} FULL and {swa} sliding-window pages of {config.page_size} tokens"
                    f"{' and a state' if target.has_state else ''} to reach length {reach}, the rows of the last round "
                    f"included; a pool of {layout.nbytes} bytes does not hold them: raise {way_out}"
                )
            continue
        if pages > config.full_pages() - 1:
            raise InputError(
                f"prompt {i} needs {pages} pages of {config.page_size} tokens to reach length {reach}; the pool has "
                f"{config.full_pages() - 1} besides the sink page: raise num_pages to at least {pages + 1}"
            )
        if target.swa_window is not None:
            swa = min(pages, config.swa_pages_per_row(target.swa_window))
            if swa > config.swa_pages(target.swa_window) - 1:
                raise InputError(
                    f"prompt {i} needs {swa} sliding-window pages; the pool has "
                    f"{config.swa_pages(target.swa_window) - 1} besides the sink page: raise num_swa_pages to at least "
                    f"{swa + 1}"
                )


def init_state(
    target: Model,
    drafter: Drafter | None,
    config: SpecConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    stop_strings: StopStrings | None = None,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
) -> SpecState:
    """A state with the prompts laid out and nothing in the cache yet.

    Args:
      target: the model that decides.
      drafter: who proposes; None for plain decoding.
      config: shapes.
      prompts: token ids of each request, at most `config.batch_size` of them; further lanes stay empty.
      max_new_tokens: tokens each request may emit, one number or one a prompt; `config.max_new_tokens` by default.
      stop_ids: ids that end a request; the id itself is emitted.
      stop_strings: texts that end a request; the token that completes one is emitted.
      temperature: what the logits are divided by; 0 takes the most likely token. This and the next three are one number
        or one a prompt; a temperature above 0 needs `SpecConfig.sampling`.
      top_k: how many of the most likely tokens may be said; 0 for all.
      top_p: the mass that the most likely tokens which may be said have at least, of what top_k has left; 1 for all.
      seed: of a request's coins, 0 .. 2**32 - 1. What a request says depends on its prompt, settings and seed; requests
        that are alike in all of them say the same.

    Returns:
      The state, ready for `prefill`.

    Raises:
      InputError: an empty prompt, one that leaves no room in the context, an id out of range, a pool too small for one
        request, a sampling setting that is none.
    """
    prompts = [np.asarray(prompt) for prompt in prompts]
    limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    limits = [int(limit)] * len(prompts) if np.ndim(limit) == 0 else [int(n) for n in limit]
    if len(prompts) > config.batch_size:
        raise InputError(
            f"{len(prompts)} prompts do not fit batch_size={config.batch_size}: raise it or split the prompts"
        )
    check_requests(target, drafter, config, prompts, limits)
    limits = [min(limit, config.context_len) for limit in limits]  # no request can emit more; keeps them in int32
    bad = [i for i in stop_ids if not 0 <= i < target.vocab_size]
    if bad:
        raise InputError(f"stop id {bad[0]} is outside 0 .. {target.vocab_size - 1}")

    settings = pack_settings(config, len(prompts), temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

    R, window = config.rows, target.swa_window
    tokens = np.zeros((R, config.context_len), np.int32)
    for row, prompt in enumerate(prompts, start=1):
        tokens[row, : prompt.size] = prompt
    fields = dict.fromkeys(_REQUEST_FIELDS, np.zeros(R, np.int32))
    present = slice(1, 1 + len(prompts))
    for name, values in (
        ("status", WAITING),
        ("prompt_len", [prompt.size for prompt in prompts]),
        ("max_new_tokens", limits),
    ):
        fields[name] = np.zeros(R, np.int32)
        fields[name][present] = values
    stops = np.full((R, max(len(stop_ids), 1)), -1, np.int32)
    stops[:, : len(stop_ids)] = np.asarray(list(stop_ids), np.int32)

    cache, pages, draft = init_memory(target, drafter, config)
    layout = verify_layout(
        batch_size=config.batch_size,
        num_rows=config.num_draft_tokens,
        pages_per_row=config.pages_per_row,
        swa=window is not None,
        kpool=kpool_of(target, config),
        states=target.has_state,
    )
    state = SpecState(
        cache=cache,
        draft=draft,
        pages=pages,
        tokens=jnp.asarray(tokens),
        stop_ids=jnp.asarray(stops),
        round_log=jnp.zeros((R, max(min(config.max_new_tokens, config.context_len), 1), 2), jnp.int32),
        logprobs=jnp.zeros((R, config.context_len), jnp.float32) if config.logprobs else None,
        packed=jnp.zeros((len(_REQUEST_FIELDS), R), jnp.int32),
        metadata=PackedMetadata.zeros(layout),
        settings=None if settings is None else jnp.asarray(settings),
        stops=None if stop_strings is None else stop_strings.matcher(len(prompts), R, target.vocab_size),
    )
    return state.with_(requests=Requests(**{name: jnp.asarray(row) for name, row in fields.items()}))
