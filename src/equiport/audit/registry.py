"""Every rule, one line each."""

from __future__ import annotations

from equiport.audit.model import Rule
from equiport.audit.rules import (
    argument_mutated,
    best_of_n,
    beyond_dtype,
    borrowed_leaf,
    copied_comparator,
    feature_disabled,
    foreign_attribute,
    hard_coded,
    hidden_nan,
    local_reference,
    loose_tolerance,
    no_comparison,
    not_strict,
    opaque,
    outside_world,
    reference_in_port,
    reference_origin,
    same_source,
    skipped_test,
    stateful_cache,
    swallowed_error,
    uninitialised,
)

RULES: tuple[Rule, ...] = (
    opaque.RULE,
    local_reference.RULE,
    reference_origin.RULE,
    reference_in_port.RULE,
    borrowed_leaf.RULE,
    not_strict.RULE,
    skipped_test.RULE,
    swallowed_error.RULE,
    no_comparison.RULE,
    same_source.RULE,
    loose_tolerance.RULE,
    copied_comparator.RULE,
    foreign_attribute.RULE,
    outside_world.RULE,
    hard_coded.RULE,
    hidden_nan.RULE,
    best_of_n.RULE,
    feature_disabled.RULE,
    stateful_cache.RULE,
    uninitialised.RULE,
    argument_mutated.RULE,
    beyond_dtype.RULE,
)
