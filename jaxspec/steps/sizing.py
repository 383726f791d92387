"""A unified pool cut to a budget of bytes: how many pages of each kind, how many requests, and what lies beside it.

The budget is spent in this order:

1. Requests. A running request has its states in the pool, and one more for each row it verifies, which the step keeps
   outside until commit has chosen. The share of the budget that states may have decides how many requests there are.
2. The pool gets all the rest, in whole FULL pages, less what a draft with a pool of its own keeps for them.
3. Of what states leave there, FULL and SWA tokens get `swa_full_tokens_ratio` SWA for each FULL.

All sizes are those of `PoolLayout`: padded entries, draft lanes, sinks. The counts are a plan; what kinds do not use
the others can have. Whatever the ratios say, one request of `context_len` tokens fits beside all states, so a larger
budget is never refused where a smaller one is not.

Source: SGLang's sizing of unified memory pools (0.5.23). Ours differs where this library does: entries with all their
padding, sinks charged, no row of states for a padded lane, as lanes of padding are among the B, and a floor that holds
the FULL pages of a request too.
"""

import bisect
import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

from jaxspec.cache import PoolLayout
from jaxspec.config import SpecConfig
from jaxspec.drafting import Drafter
from jaxspec.errors import InputError
from jaxspec.models.contract import Model
from jaxspec.steps.memory import place, private_bytes, smallest_pool


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n of 0 .. limit that fits, where all smaller ones do; 0 is not asked."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def _swa_tokens(full_tokens: int, ratio: float, page_size: int) -> int:
    return int(full_tokens * ratio) // page_size * page_size


def most_full_tokens(
    budget: int, *, full_bytes: int, swa_bytes: int, ratio: float, page_size: int, draft_bytes: int = 0
) -> int:
    """The most FULL tokens, in whole pages, that a budget pays for with their SWA tokens, sinks not counted.

    F FULL tokens come with S = floor(F * ratio) SWA tokens, rounded down to pages, and take F * full_bytes +
    S * swa_bytes. A draft with a pool of its own has a row for each token that this memory could hold if all of it were
    FULL, and a page for the sink.

    Args:
      budget: bytes.
      full_bytes, swa_bytes: bytes a token in a FULL and in an SWA page.
      ratio: SWA tokens a FULL token.
      page_size: tokens a page.
      draft_bytes: bytes a token in the draft's own pool; 0 if its rows are lanes of the entries.

    Returns:
      F, in tokens, a multiple of page_size.

    Source: SGLang's sizing of FULL and sliding-window tokens on unified memory.

    Example:
      >>> sizes = {"full_bytes": 1152, "swa_bytes": 512, "ratio": 0.1, "page_size": 4}
      >>> most_full_tokens(100_000, **sizes), most_full_tokens(100_000, **sizes, draft_bytes=256)
      (80, 68)
    """

    def fits(pages: int) -> bool:
        tokens = pages * page_size
        pool = tokens * full_bytes + _swa_tokens(tokens, ratio, page_size) * swa_bytes
        private = (-(-max(pool // full_bytes - 1, 0) // page_size) + 1) * page_size * draft_bytes
        return pool + private <= budget

    return page_size * _largest(budget // (page_size * full_bytes), fits)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What pages and requests take.

    `layout` is any layout of the model's, `states` and `rows` are the states a request has in the pool and beside it,
    `draft_bytes` those a token in a draft's own pool.
    """

    layout: PoolLayout
    states: int
    rows: int
    draft_bytes: int

    def page_bytes(self, kind: str) -> int:
        """Bytes of a page of the kind, 0 if no layer is stored there."""
        return self.layout.entries[kind].page_bytes if kind in self.layout.kinds else 0

    @property
    def page(self) -> int:
        """Bytes of a FULL page and of what a draft of its own keeps for it."""
        return self.page_bytes("full") + self.layout.page_size * self.draft_bytes

    @property
    def scratch(self) -> int:
        """Bytes of a request's states beside the pool. Rings are not among them: they are rolled back like rows."""
        return self.rows * (self.page_bytes("state") - self.layout.ring_bytes)

    def takes(self, requests: int, full: int, swa: int) -> int:
        """The least budget with which `requests` run while `full` and `swa` pages are alive."""
        same = {name: getattr(self.layout, name) for name in ("layers", "draft_layers", "page_size", "dtype")}
        pool = PoolLayout.for_pages(**same, full=full, swa=swa, state=requests * self.states)
        return pool.num_pages("full") * self.page + requests * self.scratch

    def at_most(self, budget: int, full: int, swa: int) -> int:
        """No budget holds more requests of so many pages each, even without the sinks."""
        each = full * self.page + swa * self.page_bytes("swa") + self.states * self.page_bytes("state") + self.scratch
        return budget // each


def _running(sizes: _Sizes, budget: int, wanted: int | None, full: int, swa: int, state_ratio: float) -> int:
    """How many requests run: what is wanted, as far as states and pages reach. One of `full` and `swa` pages fits."""
    state = sizes.page_bytes("state") if sizes.scratch else 0  # a model with rings alone is bound by its pages
    if not state and wanted is None:
        return _largest(sizes.at_most(budget, full, swa), lambda n: sizes.takes(n, n * full, n * swa) <= budget)
    limits = [sizes.at_most(budget, 1, 1)]
    if state:
        share = int(budget * state_ratio / (1 + state_ratio))
        limits.append(max(1, (share - state) // (sizes.states * state + sizes.scratch)))
    if wanted is not None:
        limits.append(wanted)
    return _largest(min(limits), lambda n: sizes.takes(n, max(n, full), max(n, swa)) <= budget)


def _planned(layout: PoolLayout, states: int, ratio: float) -> tuple[int, int]:
    """FULL and SWA pages that fit beside so many states: the most there are with their tokens in that ratio."""
    page_size = layout.page_size
    # Bytes a slot. Of a FULL page's section a fraction of a byte may be left out: what fits is asked of the layout.
    sizes = {kind: entry.page_bytes // entry.per_page for kind, entry in layout.entries.items()}

    def swa(full: int) -> int:
        return _swa_tokens(full * page_size, ratio, page_size) // page_size if "swa" in sizes else 0

    tokens = most_full_tokens(
        layout.nbytes - states * sizes.get("state", 0),
        full_bytes=sizes["full"],
        swa_bytes=sizes.get("swa", 0),
        ratio=ratio,
        page_size=page_size,
    )
    full = _largest(tokens // page_size, lambda n: layout.holds(full=n, swa=swa(n), state=states))
    return full, swa(full)


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """A unified pool of a budget, and what may be expected of it. Counts of pages leave the sinks out.

    `full_pages`, `swa_pages` and `state_pages` can be alive at once; so can the pages of `whole_requests`, and those of
    one request of context_len tokens beside all states.

    Attributes:
      layout: the pool's `PoolLayout`; `layout.nbytes` is its size in bytes.
      full_pages: FULL pages, of page_size tokens each.
      swa_pages: SWA pages, of page_size tokens each; 0 if no layer is stored there.
      state_pages: states, one a page, `states_per_request` for each of `requests`; 0 if no layer has a state.
      requests: B, requests that may run at once: each has its states, and there is a page of each kind for it.
      whole_requests: requests of context_len tokens that may run at once, no more than B, none ever short of a page. A
        batch of more may run out of pages, if its requests grow long together.
      scratch_bytes: bytes, outside the pool, of the states after each verified row: B * D * bytes of a state.
      draft_bytes: bytes, outside the pool, of a draft's own pool: a row for each token with a virtual page.
      num_draft_tokens: D, rows verified per request and round.
      context_len: most tokens a sequence may hold.
      prefill_chunk: prompt tokens processed per request and prefill forward.
    """

    layout: PoolLayout
    full_pages: int
    swa_pages: int
    state_pages: int
    requests: int
    whole_requests: int
    scratch_bytes: int
    draft_bytes: int
    num_draft_tokens: int
    context_len: int
    prefill_chunk: int

    @property
    def bytes_used(self) -> int:
        """Bytes of all three: the pool, the scratch and the draft's own pool. At most the budget."""
        return self.layout.nbytes + self.scratch_bytes + self.draft_bytes

    def spec_fields(self) -> dict[str, Any]:
        """Fields of a `SpecConfig` whose step has this pool; `max_new_tokens` is yours to add, and a `batch_size` of
        less than `requests` yours to choose."""
        return {
            "batch_size": self.requests,
            "num_draft_tokens": self.num_draft_tokens,
            "context_len": self.context_len,
            "page_size": self.layout.page_size,
            "prefill_chunk": self.prefill_chunk,
            "memory": "unified",
            "pool_bytes": self.layout.nbytes,
        }

    @classmethod
    def from_budget(
        cls,
        budget: int,
        model: Model,
        drafter: Drafter | None = None,
        *,
        num_draft_tokens: int = 1,
        requests: int | None = None,
        context_len: int | None = None,
        page_size: int = 64,
        prefill_chunk: int = 128,
        swa_full_tokens_ratio: float = 0.8,
        state_full_memory_ratio: float = 0.9,
        states_per_request: int = 1,
        private_draft_bytes: int = 0,
    ) -> "PoolConfig":
        """The largest pool of a budget, for a model and a drafter.

        With r = state_full_memory_ratio, E bytes a state and q = states_per_request, states may have budget * r /
        (1 + r) bytes, so that (that - E) // (E * (q + D)) requests run: E for the sink, q in the pool and D beside it
        for each. At least one does, and no more than leave one request of context_len tokens its pages.

        Args:
          budget: bytes for K, V and states, the model's and the drafter's. Weights and activations are not among them.
          model: whose layers, dtype and context are meant.
          drafter: who drafts; its `cache_layers`, if it has any, are lanes. One that keeps a private pool because its
            rows cannot be lanes is paid for out of the budget too.
          num_draft_tokens: D, rows verified per request and round.
          requests: most requests that run at once. None: what the states allow; for a model without any, as many
            requests of context_len tokens as fit.
          context_len: most tokens a sequence may hold; None for the model's.
          page_size, prefill_chunk: as in `SpecConfig`.
          swa_full_tokens_ratio: SWA tokens planned for a FULL token, above 0 and at most 1.
          state_full_memory_ratio: bytes that states may have for a byte of pages, above 0.
          states_per_request: states that a running request has in the pool: its own, and those it tracks.
          private_draft_bytes: bytes a token of what another draft keeps beside the pool, one that the library does not
            know of.

        Raises:
          InputError: the budget does not hold one request of context_len tokens; the message says what does. Or an
            argument is out of its range.
          ValueError: the layers or the size make no `PoolLayout`.

        Source: SGLang's sizing of unified memory pools; see the module for the differences.

        Example:
          >>> from jaxspec.cache import LayerSpec
          >>> layers = (LayerSpec(2, 64, value_dim=32),) * 3 + (LayerSpec(2, 64, 8, "swa"),)
          >>> model = Model(None, layers, vocab_size=61, context_len=64, dtype="bfloat16")
          >>> pool = PoolConfig.from_budget(100_000, model, page_size=4, prefill_chunk=4, swa_full_tokens_ratio=0.1)
          >>> pool.full_pages, pool.swa_pages, pool.requests, pool.bytes_used
          (19, 1, 1, 96768)
          >>> config = SpecConfig(**pool.spec_fields(), max_new_tokens=16)
        """
        for name, value, low in (
            ("budget", budget, 1),
            ("requests", 1 if requests is None else requests, 1),
            ("states_per_request", states_per_request, 1),
            ("private_draft_bytes", private_draft_bytes, 0),
        ):
            if not isinstance(value, numbers.Integral) or value < low:
                raise InputError(f"{name}={value!r}: must be an integer of at least {low}")
        if not 0 < swa_full_tokens_ratio <= 1:
            raise InputError(f"swa_full_tokens_ratio={swa_full_tokens_ratio!r}: must be above 0 and at most 1")
        if not 0 < state_full_memory_ratio < math.inf:
            raise InputError(f"state_full_memory_ratio={state_full_memory_ratio!r}: must be above 0 and finite")
        shape = SpecConfig(
            batch_size=1,
            num_draft_tokens=num_draft_tokens,
            context_len=model.context_len if context_len is None else context_len,
            max_new_tokens=0,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            memory="unified",
        )
        drafter = place(model, drafter, shape)
        private_draft_bytes += private_bytes(drafter)
        sizes = _Sizes(
            layout=smallest_pool(model, drafter, shape, full=1, swa=1, state=1),
            states=states_per_request,
            rows=num_draft_tokens,
            draft_bytes=private_draft_bytes,
        )
        full = shape.pages_per_row
        swa = 0 if model.swa_window is None else shape.swa_pages_per_row(model.swa_window)
        least = sizes.takes(1, full, swa)
        if budget < least:
            raise InputError(
                f"budget={budget}: one request of {shape.context_len} tokens takes {least} bytes; give at least as "
                "many, or lower context_len"
            )

        running = _running(sizes, budget, requests, full, swa, state_full_memory_ratio)
        scratch = running * sizes.scratch
        pages = (budget - scratch) // sizes.page
        layout = dataclasses.replace(sizes.layout, units=pages * sizes.layout.page_units("full"))
        states = running * states_per_request if "state" in layout.kinds else 0
        full_pages, swa_pages = _planned(layout, states, swa_full_tokens_ratio)
        whole = _largest(running, lambda n: layout.holds(full=n * full, swa=n * swa, state=n * states_per_request))
        return cls(
            layout=layout,
            full_pages=full_pages,
            swa_pages=swa_pages,
            state_pages=states,
            requests=running,
            whole_requests=whole,
            scratch_bytes=scratch,
            draft_bytes=pages * page_size * private_draft_bytes,
            num_draft_tokens=num_draft_tokens,
            context_len=shape.context_len,
            prefill_chunk=prefill_chunk,
        )
