"""The pages of running requests between two forwards: who lacks some, handing them out, taking back what is done with.

With static memory this is little work, done in every round. With unified memory pages of all kinds share a pool, so it
is more, and most rounds need none of it: a request gets pages for several rounds at once (`SpecConfig.reserve`), and
what others leave behind is taken back before pages are handed out next, when a call ends, or where rounds run one by
one when a request does.
"""

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, Pages, PoolCache, UnifiedPages
from jaxspec.cache.pages import run_if
from jaxspec.steps.state import FINISHED, RUNNING, Requests

Array = jax.Array


def running_rows(requests: Requests) -> Array:
    """int32[B], the request row of each lane whose request is running, 0 for the others."""
    running = requests.status[1:] == RUNNING
    return jnp.where(running, jnp.arange(1, 1 + running.size, dtype=jnp.int32), 0)


def next_end(config, requests: Requests, ahead: int | None = None) -> Array:
    """int32[R], where the rows of each request's next round end, or so many tokens ahead; at most the context limit."""
    ahead = config.num_draft_tokens if ahead is None else ahead
    return jnp.minimum(requests.seq_len + ahead, config.context_len)


def last_end(config, requests: Requests) -> Array:
    """int32[R], where the rows of each request's last round end: none is verified past the last token that it may
    emit."""
    final = requests.prompt_len + requests.max_new_tokens - 2 + config.num_draft_tokens
    return jnp.minimum(final, config.context_len)


def is_short(spec, requests: Requests, pages: UnifiedPages) -> Array:
    """bool[], whether a running request lacks pages for the rows of its next round."""
    return pages.short(requests.status == RUNNING, next_end(spec.config, requests))


def hand_out(
    spec,
    requests: Requests,
    pages: Pages | UnifiedPages,
    cache: KVCache | PoolCache,
    wanted: Array | bool = True,
) -> tuple[Pages | UnifiedPages, KVCache | PoolCache, Array]:
    """Gives every running request pages for its next round, and for `config.reserve` rows where nobody can miss them.

    Pages ahead are not taken back before their request ends. So with unified memory they are handed out only if the
    pool holds all that the running requests will ever ask for; a generation then runs out of pages where it would
    without them, and nowhere else.

    Args:
      spec: the `SpecStep` (static).
      requests, pages, cache: of the state.
      wanted: bool[]; False hands out nothing, and that is enough.

    Returns:
      Pages and cache after, and bool[], whether there were enough for the next round; if not, both are as they were.
    """
    config = spec.config
    least, final = next_end(config, requests), last_end(config, requests)
    reach = jnp.maximum(jnp.minimum(next_end(config, requests, config.reserve), final), least)
    if config.memory == "unified":
        reach = jnp.where(_all_fit(spec, requests, pages, final), reach, least)
    max_new = min(-(-config.reserve // config.page_size) + 1, config.pages_per_row)
    rows = jnp.where(wanted, running_rows(requests), 0)
    return pages.allocate(cache, rows, reach[1:], least=least[1:], max_new=max_new, backend=config.kernel_backend)


def _all_fit(spec, requests: Requests, pages: UnifiedPages, final: Array) -> Array:
    """bool[], whether the pool holds the pages of all running requests up to `final`, as many of each as it has at
    once."""
    config, window = spec.config, spec.target.swa_window
    running = requests.status == RUNNING
    full = jnp.where(running, jnp.maximum(-(-final // config.page_size) - pages.num_pages, 0), 0)
    swa = jnp.zeros_like(full)
    if window is not None:
        bound = pages.num_pages - pages.swa_start
        swa = jnp.minimum(full, jnp.maximum(config.swa_pages_per_row(window) - bound, 0))
    return pages.fits(full.sum(dtype=jnp.int32), swa.sum(dtype=jnp.int32))


def retire(
    spec, requests: Requests, pages: Pages | UnifiedPages, rows: Array, max_advance: int
) -> Pages | UnifiedPages:
    """The pages after taking back SWA pages that `rows`, int32[B], have moved past: of each no more than it can have
    left behind in `max_advance` tokens (static)."""
    config, window = spec.config, spec.target.swa_window
    if window is None:
        return pages
    max_retired = min(-(-max_advance // config.page_size) + 1, config.pages_per_row)
    return pages.retire(rows, requests.seq_len[1:], window, max_retired=max_retired)


def reclaim(spec, requests: Requests, pages: UnifiedPages, rows: Array) -> UnifiedPages:
    """The pages after taking back the SWA pages that `rows`, int32[B], have moved past since pages were handed out, and
    all of what has ended."""
    # A row with pages enough goes on to the end of its last one before anybody looks at it.
    max_advance = spec.config.reserve + spec.config.page_size
    return retire(spec, requests, pages, rows, max_advance).release(_ended(requests, pages))


def free_pages(
    spec, requests: Requests, pages: Pages | UnifiedPages, rows: Array, *, max_advance: int | None = None
) -> Pages | UnifiedPages:
    """Retires the SWA pages that `rows` have moved past and frees finished requests.

    After a round with unified memory only when the next one will hand out pages, or when a request ended: nobody else
    wants them before.

    Args:
      spec: the `SpecStep` (static).
      requests, pages: lengths already raised.
      rows: int32[B], b + 1 for lanes that took part, else 0.
      max_advance: tokens that a request may have gained since the last call, after a prefill; None after a round
        (static).

    Returns:
      The pages after.
    """
    ended = _ended(requests, pages)
    if spec.config.memory == "unified" and max_advance is None:
        due = ended.any() | is_short(spec, requests, pages)
        (pages,) = run_if(due, lambda pages: (reclaim(spec, requests, pages, rows),), pages)
        return pages
    pages = retire(spec, requests, pages, rows, spec.config.num_draft_tokens if max_advance is None else max_advance)
    (pages,) = run_if(ended.any(), lambda pages: (pages.release(ended),), pages)
    return pages


def _ended(requests: Requests, pages: Pages | UnifiedPages) -> Array:
    """bool[R], requests that have ended and own pages still."""
    return (requests.status == FINISHED) & (pages.num_pages > 0)
