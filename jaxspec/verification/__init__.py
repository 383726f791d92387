"""Which drafts are kept, what is drawn, and where a request ends."""

from jaxspec.verification.block import verify_block
from jaxspec.verification.chain import sample_token, verify_greedy, verify_match, verify_rejection
from jaxspec.verification.coins import Coins, block_coins, chain_coins, draft_noise
from jaxspec.verification.draws import inverse_cdf
from jaxspec.verification.greedy import greedy_accept, greedy_token
from jaxspec.verification.nodes import (
    BLOCK,
    GREEDY,
    MATCH,
    NO_RULE,
    REJECTION,
    RULE_NAMES,
    Nodes,
    Verified,
    chain_nodes,
)
from jaxspec.verification.sampling import Sampling, target_probs
from jaxspec.verification.stop_strings import StopStrings
from jaxspec.verification.stopping import Ending, StopMatcher, end_run

__all__ = [
    "BLOCK",
    "GREEDY",
    "MATCH",
    "NO_RULE",
    "REJECTION",
    "RULE_NAMES",
    "Coins",
    "Ending",
    "Nodes",
    "Sampling",
    "StopMatcher",
    "StopStrings",
    "Verified",
    "block_coins",
    "chain_coins",
    "chain_nodes",
    "draft_noise",
    "end_run",
    "greedy_accept",
    "greedy_token",
    "inverse_cdf",
    "sample_token",
    "target_probs",
    "verify_block",
    "verify_greedy",
    "verify_match",
    "verify_rejection",
]
