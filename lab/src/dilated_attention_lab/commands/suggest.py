"""`suggest`: a pattern for a length, a number of heads and a budget."""

from __future__ import annotations

import argparse

from dilated_attention import suggest_pattern
from dilated_attention_lab.options import budget, flag, option, positive


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a pattern of dilated branches that costs at most the budget, and the reasons for it."
    option(parser, "tokens", positive, "sequence length in tokens", required=True)
    option(parser, "heads", positive, "number of KV heads", required=True)
    what = "share of the cost of dense attention, such as 0.1, or mean number of keys per query, such as 2048"
    option(parser, "budget", budget, what, required=True)
    flag(parser, "causal", "use a causal mask")
    option(parser, "largest-rate", positive, "largest dilation rate of any branch", shown="--heads")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.budget == 1 and type(options.budget) is int and options.tokens > 1:
        raise ValueError("--budget 1 is one key per query. Give 1.0 for the cost of dense attention")
    wanted = {"budget": options.budget, "is_causal": options.causal, "largest_rate": options.largest_rate}
    print(suggest_pattern(options.tokens, options.heads, **wanted))
    return 0
