"""Static configuration of a speculative step: everything that fixes a compiled program's shapes."""

import dataclasses
import numbers

from jaxspec.errors import InputError
from pallas_kernels import BACKENDS

MEMORIES = ("static", "unified")
VERIFIERS = ("rejection", "block", "match")


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """Shapes of a step. Hashable: equal configurations share one compiled program.

    Attributes:
      batch_size: B, requests decoded together; slots without a request are padding.
      num_draft_tokens: D, rows verified per request and round: the anchor and D - 1 drafts. 1 is plain decoding.
      context_len: most tokens a sequence may hold, prompt and completion together.
      max_new_tokens: most tokens any request of the batch may ask for; sizes the log of rounds.
      page_size: tokens a page, a power of two.
      prefill_chunk: prompt tokens processed per request and prefill forward.
      num_pages: FULL pages, the sink included. None: enough for B sequences of context_len.
      num_swa_pages: SWA pages, the sink included. None: enough for B windows in flight.
      memory: "static", a buffer a layer and a pool for each kind of page; or "unified", one pool for all of them, where
        what one kind frees the others can have.
      pool_bytes: size of the unified pool. None: what the pages of split pools would take.
      sampling: who verifies drafts where requests sample, temperature, top-k, top-p and seed being each request's own:
        "rejection", draft by draft; "block", all of them together, which accepts at least as many; or "match", against
        a draw of the target's own, which also takes drafts without a distribution. None: every request is greedy.
      check_ids: whether to find out, while the step is traced, if an id is used in a space it does not belong to; see
        `jaxspec.metadata.Ids`. The compiled program is the same.
      logprobs: whether the log-probability of every emitted token is kept: the target's own, at temperature 1 and of
        all tokens, however the request samples.
      pool_seed: None, or a seed that shuffles which physical page is handed out; no result depends on it.
      kernel_backend: who runs the kernels of metadata, of attention, of storing K and V and of the rows of Qwen3 layers
        (their products, norms and rotation): None chooses by device; or 'reference', 'interpret', 'triton' or 'mosaic',
        with which all but the metadata are as with None. Metadata and what is stored are equal to the bit, attention
        and rows up to the order of their sums and what is rounded in between.
      kpool_metadata_fusion: whether one kernel writes all metadata of a forward of a model with sparse layers (KPool),
        where geometry and platform allow it; `make_spec_step` decides, once. No value depends on it.
    """

    batch_size: int
    num_draft_tokens: int
    context_len: int
    max_new_tokens: int
    page_size: int = 64
    prefill_chunk: int = 128
    num_pages: int | None = None
    num_swa_pages: int | None = None
    memory: str = "static"
    pool_bytes: int | None = None
    sampling: str | None = None
    logprobs: bool = False
    check_ids: bool = False
    pool_seed: int | None = None
    kernel_backend: str | None = None
    kpool_metadata_fusion: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                field.name not in ("kernel_backend", "memory", "sampling")
                and value is not None
                and not isinstance(value, numbers.Integral)
            ):
                raise InputError(f"{field.name}={value!r}: must be an integer")
        if self.pool_bytes is not None and self.pool_bytes < 1:
            raise InputError(f"pool_bytes={self.pool_bytes}: must be at least 1; None sizes the pool")
        for name in ("batch_size", "num_draft_tokens", "context_len", "page_size", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_new_tokens < 0:
            raise InputError(f"max_new_tokens={self.max_new_tokens}: must be at least 0")
        if self.memory not in MEMORIES:
            raise InputError(f"memory={self.memory!r}: must be one of {', '.join(map(repr, MEMORIES))}")
        if self.sampling is not None and self.sampling not in VERIFIERS:
            raise InputError(
                f"sampling={self.sampling!r}: must be None, all requests greedy, or one of "
                f"{', '.join(map(repr, VERIFIERS))}"
            )
        if self.pool_bytes is not None and (self.memory != "unified" or self.num_pages or self.num_swa_pages):
            raise InputError(
                f"pool_bytes={self.pool_bytes}: it sizes the pool of memory='unified', in place of num_pages and "
                "num_swa_pages"
            )
        for name in ("num_pages", "num_swa_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: must be at least 1, the sink page; None sizes the pool")
        backends = [name for name in BACKENDS if name != "checked"]  # which runs eagerly, not inside a compiled step
        if self.kernel_backend is not None and self.kernel_backend not in backends:
            raise InputError(
                f"kernel_backend={self.kernel_backend!r}: must be None or one of {', '.join(map(repr, backends))}"
            )
        if self.page_size & (self.page_size - 1):
            raise InputError(f"page_size={self.page_size}: must be a power of two")
        if self.num_draft_tokens > self.context_len:
            raise InputError(
                f"num_draft_tokens={self.num_draft_tokens} is more than context_len={self.context_len}: "
                "draft fewer tokens"
            )

        if self.full_pages() * self.page_size >= 2**31:
            raise InputError(
                f"{self.full_pages()} pages of {self.page_size} tokens: slots are int32, so the product must stay "
                "below 2147483648: use a smaller pool"
            )

    @property
    def asks_probs(self) -> bool:
        """Whether the verifier asks what drafts were drawn from."""
        return self.sampling in ("rejection", "block")

    @property
    def pages_per_row(self) -> int:
        """P, pages that hold context_len tokens."""
        return -(-self.context_len // self.page_size)

    @property
    def reserve(self) -> int:
        """Rows that a request gets pages for, from the committed length on: the D of a round. With unified memory those
        of two rounds, and where pages are large half a page, up to eight rounds: then most rounds have nothing to hand
        out. That is where the pool holds all that the running requests will ask for."""
        D = self.num_draft_tokens
        return max(2 * D, min(8 * D, self.page_size // 2)) if self.memory == "unified" else D

    @property
    def rows(self) -> int:
        """R, request rows: the sink row 0 and one for each batch slot."""
        return self.batch_size + 1

    def full_pages(self) -> int:
        """FULL pages of the pool, the sink included."""
        return 1 + self.batch_size * self.pages_per_row if self.num_pages is None else self.num_pages

    def swa_pages_per_row(self, window: int) -> int:
        """SWA pages one request may hold at once, while a forward of the widest kind is in flight."""
        widest = max(self.reserve, self.prefill_chunk)
        return min(self.pages_per_row, -(-(window + widest - 1) // self.page_size) + 1)

    def swa_pages(self, window: int | None) -> int:
        """SWA pages of the pool, the sink included; 1 when no layer is stored there."""
        if window is None:
            return 1
        wanted = (
            1 + self.batch_size * self.swa_pages_per_row(window) if self.num_swa_pages is None else self.num_swa_pages
        )
        return min(wanted, self.full_pages())
