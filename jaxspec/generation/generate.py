"""`jaxspec.generate`: the whole way from token ids to token ids."""

import dataclasses
import numbers
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafting import Drafter
from jaxspec.errors import InputError
from jaxspec.generation.loops import Driver, OnTokens, prefill_reported, reports, rounds_reported, run_to_end
from jaxspec.generation.results import Generation, read_requests
from jaxspec.models.contract import Model
from jaxspec.steps import Params, init_state, make_spec_step
from jaxspec.verification import StopStrings
from pallas_kernels.backend import declined

LOOPS = ("device", "chunked", "python")


def default_config(
    target: Model,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    page_size: int = 64,
    **others,
) -> SpecConfig:
    """A configuration that fits the prompts: the context is rounded up, so that similar calls share a
    program."""
    longest = max((len(prompt) for prompt in prompts), default=1)
    step = max(page_size, 256)
    wanted = -(-(longest + max_new_tokens) // step) * step
    return SpecConfig(
        batch_size=max(len(prompts), 1),
        num_draft_tokens=num_draft_tokens,
        context_len=min(wanted, target.context_len),
        max_new_tokens=max_new_tokens,
        page_size=page_size,
        **others,
    )


def default_verifier(drafter: Drafter | None, temperature: float | Sequence[float]) -> str | None:
    """Who verifies where nobody says: None if no request samples."""
    if not any(isinstance(t, numbers.Real) and t > 0 for t in np.ravel(np.asarray(temperature, object))):
        return None
    return "rejection" if getattr(drafter, "has_probs", False) else "match"


def settle(
    target: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None,
    num_draft_tokens: int,
    max_new_tokens: int | Sequence[int] | None,
    memory: str | None,
    logprobs: bool | None,
    config: SpecConfig | None,
    temperature: float | Sequence[float],
    verifier: str | None,
    stop_strings: StopStrings | None,
    batch_size: int | None = None,
) -> tuple[list[np.ndarray], SpecConfig, int | Sequence[int] | None]:
    """What the arguments of a call come to: the prompts as arrays, the configuration, and the limits of new tokens.

    Args:
      batch_size: B of a configuration that is made here; by default there is a lane for each prompt.

    Raises:
      InputError: arguments that are none, or that the configuration contradicts.
    """
    if num_draft_tokens < 1:
        raise InputError(f"num_draft_tokens={num_draft_tokens}: must be at least 1; 1 is plain decoding")
    if stop_strings is not None and not isinstance(stop_strings, StopStrings):
        raise InputError(f"stop_strings={stop_strings!r}: wrap the texts as jaxspec.StopStrings(tokenizer, texts)")
    if not isinstance(params, Params):
        raise InputError(f"params is a {type(params).__name__}: wrap the weights as jaxspec.Params(target, draft)")
    prompts = [np.asarray(prompt) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        if prompt.ndim != 1:
            raise InputError(
                f"prompt {i}: expected a sequence of token ids, got shape {prompt.shape}: give a list of lists"
            )
    if config is None:
        max_new_tokens = 128 if max_new_tokens is None else max_new_tokens
        if drafter is None:
            num_draft_tokens = 1
        limits = np.atleast_1d(max_new_tokens).tolist()
        config = default_config(
            target,
            prompts,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max(limits, default=0),
            memory=memory or "static",
            logprobs=bool(logprobs),
            sampling=verifier or default_verifier(drafter, temperature),
        )
        if batch_size is not None:
            config = dataclasses.replace(config, batch_size=batch_size)
    for name, value in (("memory", memory), ("logprobs", logprobs), ("sampling", verifier)):
        if value is not None and value != getattr(config, name):
            raise InputError(f"{name}={value!r}: the configuration says {getattr(config, name)!r}; say it there")
    if config.kernel_backend in ("triton", "mosaic") and (reason := declined(config.kernel_backend)):
        raise InputError(f"kernel_backend={config.kernel_backend!r}: {reason}; leave it out, or name 'reference'")
    return prompts, config, max_new_tokens


def generate(
    target: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 8,
    max_new_tokens: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    loop: str = "device",
    memory: str | None = None,
    logprobs: bool | None = None,
    config: SpecConfig | None = None,
    rounds_per_dispatch: int = 8,
    on_tokens: OnTokens | None = None,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
    verifier: str | None = None,
    stop_strings: StopStrings | None = None,
) -> Generation:
    """Completes prompts by speculative decoding. Greedy ids are those of plain decoding; what is sampled follows the
    target's own distribution exactly, whoever drafts.

    Args:
      target: the model that decides, see `jaxspec.Model`.
      params: weights of target and drafter.
      prompts: token ids of each request.
      drafter: `NgramDrafter`, `DraftLM`, another of `jaxspec.drafting` or your own. None is plain decoding: one row a
        round, whatever `num_draft_tokens` says.
      num_draft_tokens: D, rows verified per request and round: the newest token and D - 1 drafts.
      max_new_tokens: tokens to emit at most, one number or one a prompt; by default 128, or what `config` allows.
      stop_ids: ids that end a request; the id itself is emitted.
      loop: "device" (one dispatch, no host read before the end), "chunked" (`rounds_per_dispatch` rounds a dispatch,
        results read one dispatch late) or "python" (one round a dispatch).
      memory: "static" (the default) or "unified", see `SpecConfig`; no result depends on it.
      logprobs: whether to keep the log-probability of every token; they are not kept by default.
      config: shapes, instead of a configuration that fits the prompts; it then decides D, memory and log-probabilities,
        and `max_new_tokens` may not exceed its.
      rounds_per_dispatch: K of the chunked loop.
      on_tokens: called as `on_tokens(prompt_index, new_token_ids, finished)` while tokens arrive; needs the chunked or
        python loop.
      temperature: what the logits are divided by; 0 takes the most likely token. This and the next three are one number
        or one a prompt.
      top_k: how many of the most likely tokens may be said; 0 for all.
      top_p: the mass that the most likely tokens which may be said have at least, of what top_k has left; 1 for all.
      seed: 0 .. 2**32 - 1. What a request samples depends on its prompt, its settings and its seed, not on the batch
        around it; requests that are alike in all of them say the same.
      verifier: "rejection", "block" or "match", see `SpecConfig.sampling`. By default "rejection" if a request samples
        and the drafter can say what it drew from, "match" if it cannot; `RequestResult.rule` says what it was.
      stop_strings: texts that end a request, `jaxspec.StopStrings(tokenizer, texts)`; they are found on the device. The
        token that completes one is emitted; `RequestResult.stop_string` says which it was.

    Returns:
      A `Generation`: token ids, verify counts, accept lengths and timing. If pages run out, the requests that were
      still running have finish_reason "out_of_pages" and hold what was emitted until then.

    Raises:
      InputError: bad prompts, limits or configuration; nothing has run then.

    Example:
      >>> import jaxspec
      >>> target = jaxspec.load_model("target")
      >>> prompt = target.encode("import os\\nimport sys\\nimport")
      >>> result = jaxspec.generate(
      ...     target.model, jaxspec.Params(target.params), [prompt], drafter=jaxspec.NgramDrafter(), num_draft_tokens=4,
      ...     max_new_tokens=8)
      >>> plain = jaxspec.generate(target.model, jaxspec.Params(target.params), [prompt], max_new_tokens=8)
      >>> result.token_ids == plain.token_ids
      True
    """
    if loop not in LOOPS:
        raise InputError(f"loop={loop!r}: must be one of {', '.join(LOOPS)}")
    if on_tokens is not None and loop == "device":
        raise InputError("on_tokens needs loop='chunked' or 'python': the device loop hands out nothing before the end")
    if rounds_per_dispatch < 1:
        raise InputError(f"rounds_per_dispatch={rounds_per_dispatch}: must be at least 1")
    prompts, config, max_new_tokens = settle(
        target,
        params,
        prompts,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        memory=memory,
        logprobs=logprobs,
        config=config,
        temperature=temperature,
        verifier=verifier,
        stop_strings=stop_strings,
    )
    if not prompts:
        return Generation(requests=[], num_draft_tokens=config.num_draft_tokens, seconds=0.0, dispatches=0)
    spec = make_spec_step(target, drafter, config)
    state = init_state(
        target,
        drafter,
        config,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_strings=stop_strings,
    )
    driver = Driver(spec, params, state)

    if loop == "device":
        driver.compile(run_to_end)
        start = time.perf_counter()
        jax.block_until_ready(driver(run_to_end))
    else:
        rounds, lag = (rounds_per_dispatch, 1) if loop == "chunked" else (1, 0)
        driver.compile(prefill_reported, rounds_reported(rounds))
        start = time.perf_counter()
        for report in reports(driver, rounds, lag):
            if on_tokens is not None:
                for index in range(len(prompts)):
                    count, reason = int(report[index, 0]), int(report[index, 1])
                    if count:
                        on_tokens(index, report[index, 3 : 3 + count].tolist(), reason != 0)
    seconds = time.perf_counter() - start
    return Generation(
        requests=read_requests(driver.state, prompts, config.sampling, stop_strings),
        num_draft_tokens=config.num_draft_tokens,
        seconds=seconds,
        dispatches=driver.dispatches,
    )
