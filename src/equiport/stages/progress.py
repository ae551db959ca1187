"""What a stage shows on screen while it runs: a line a step with its time, the verdict, the next action."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape

from equiport.compare.verdict import Verdict
from equiport.experiment import StageResult
from equiport.stacks.contract import StackStatus

_COLOURS = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.NOT_RUN: "bold magenta",
}
_SHOWN_REASONS = 12


class Progress:
    """Prints to standard output; with `quiet` only the verdict."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._quiet = quiet

    def begin(self, stage: int, title: str, status: StackStatus | None) -> None:
        """Announce a stage and where it runs."""
        where = f"  [dim]{escape(status.headline)}[/dim]" if status else ""
        self._print(f"[bold]Stage {stage}[/bold] {escape(title)}{where}")

    def line(self, text: str) -> None:
        """One line of information."""
        self._print(f"  {escape(text)}")

    def step(self, text: str) -> Step:
        """A step that takes time: `with progress.step("..."):` prints its duration at the end."""
        return Step(self, text)

    def verdict(self, result: StageResult, hint: str) -> None:
        """The verdict with its reasons, blind spots and the next action."""
        colour = _COLOURS[result.verdict]
        for reason in result.reasons[:_SHOWN_REASONS]:
            subject = f" {reason.subject}" if reason.subject else ""
            self._console.print(f"  {escape(f'{reason.code}{subject}: {reason.message}')}")
        if len(result.reasons) > _SHOWN_REASONS:
            self._console.print(
                f"  ... and {len(result.reasons) - _SHOWN_REASONS} more in results/stage{result.stage}.json"
            )
        spots = f", {len(result.blind_spots)} blind spots" if result.blind_spots else ""
        self._console.print(
            f"  [{colour}]{result.verdict.value}[/{colour}] stage {result.stage} in {result.seconds:.1f} s{spots}"
        )
        if hint:
            self._print(f"  [dim]next: {escape(hint)}[/dim]")

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text)


class Step:
    """Context manager of one timed step."""

    def __init__(self, progress: Progress, text: str) -> None:
        self._progress, self._text = progress, text

    def __enter__(self) -> Step:
        self._clock = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._progress.line(f"{self._text} ({time.monotonic() - self._clock:.1f} s)")
