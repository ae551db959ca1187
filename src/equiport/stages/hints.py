"""What to do after each outcome (seed 003's decision points), printed with every verdict."""

from __future__ import annotations

from equiport.compare.verdict import Verdict

_AFTER: dict[tuple[int, Verdict], str] = {
    (0, Verdict.PASS): "stage 1 (smoke test)",
    (
        0,
        Verdict.FAIL,
    ): "mend the conversion or the structure that is named; stage 2 tells whether the rest computes alike",
    (0, Verdict.INCONCLUSIVE): "map or explain the named modules in component_mapping.json, then run stage 0 again",
    (1, Verdict.PASS): "stage 2 (component tests)",
    (1, Verdict.FAIL): "stage 2, to find the component that diverges",
    (2, Verdict.PASS): "stage 5 (end to end)",
    (2, Verdict.FAIL): "stage 3 (localisation)",
    (2, Verdict.INCONCLUSIVE): "add --generate to write the missing tests, or more seeds",
    (3, Verdict.PASS): "compare the first suspect's source and port side by side (config keys, operations, casts); "
    "write a patch into patches/ and run stage 4, or have it drafted: run_stage4.py --draft",
    (4, Verdict.PASS): "stages 1 and 5 to 6 with --patches-dir",
    (4, Verdict.FAIL): "what still fails is named; a broken composite means that the fix is incomplete",
    (3, Verdict.FAIL): "look at results/stage2.json by hand: a failing component has no change point",
    (5, Verdict.PASS): "stage 6 (distributions)",
    (
        5,
        Verdict.FAIL,
    ): "stage 3 (localisation by a traced run); if it names nothing: an unmapped component or another execution path, "
    "see class_divergence_report.json",
    (6, Verdict.PASS): "stage 7 (downstream tasks) where there is a bench_config.yaml; equiport report EXP_DIR",
    (7, Verdict.PASS): "the report: equiport report EXP_DIR",
    (7, Verdict.INCONCLUSIVE): "raise limit in bench_config.yaml, or name tasks of more items",
    (7, Verdict.FAIL): "all tasks fail: stage 2; reasoning fails and knowledge passes: stage 4; "
    "--diagnose-failures lists the items",
    (
        6,
        Verdict.FAIL,
    ): "cosine good and KL bad means probability mass differs: check logit scale, softcap and head path",
}


def next_action(stage: int, verdict: Verdict) -> str:
    """One line, or nothing."""
    return _AFTER.get((stage, verdict), "")
