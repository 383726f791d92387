"""Which drafts are kept, and where a request ends."""

from jaxspec.verification.greedy import greedy_accept, greedy_token
from jaxspec.verification.stopping import trim_run

__all__ = ["greedy_accept", "greedy_token", "trim_run"]
