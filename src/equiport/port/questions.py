"""The answers file: open questions go out, answers come back and are checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json
from equiport.port.fingerprint import OpenQuestion

ANSWERS_NAME = "answers.json"
STOP = "stop"


class Answer(BaseModel):
    """One question with room for its answer."""

    model_config = ConfigDict(extra="forbid")

    id: str
    question: str = ""
    evidence: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    answer: str | None = None


class AnswersFile(BaseModel):
    """answers.json."""

    model_config = ConfigDict(extra="forbid")

    questions: list[Answer]


def write_answers(path: Path, questions: Sequence[OpenQuestion], answers: dict[str, str] | None = None) -> Path:
    """Write the file to fill in; answers that were given stay in it."""
    known = answers or {}
    entries = [
        Answer(
            id=question.id, question=question.question, evidence=question.evidence, choices=question.choices,
            answer=known.get(question.id),
        )
        for question in questions
    ]  # fmt: skip
    return write_json(path, AnswersFile(questions=entries))


def read_answers(path: Path, asked: Sequence[OpenQuestion]) -> dict[str, str]:
    """Answers by question id; those left empty are left out.

    Raises:
        EquiportError: missing, no JSON, of another form, an answer that is no choice, or to a question nobody asks.
    """
    value = read_json(path, remedy="Give the answers file that `equiport plan` wrote.")
    try:
        entries = AnswersFile.model_validate(value).questions
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(first["msg"], where=path, field=field, remedy="Keep the file's form.") from None
    questions = {question.id: question for question in asked}
    answers: dict[str, str] = {}
    for entry in entries:
        if entry.answer is None:
            continue
        question = questions.get(entry.id)
        if question is None:
            raise EquiportError(
                "is asked by nobody for this model", where=path, field=entry.id,
                remedy="Take it out, or plan the model that the file was written for.",
            )  # fmt: skip
        if question.choices and entry.answer not in question.choices:
            raise EquiportError(
                f"answer {entry.answer!r} is none of {', '.join(question.choices)}", where=path, field=entry.id,
                remedy="Choose one of them.",
            )  # fmt: skip
        if entry.id in answers:
            raise EquiportError("is answered twice", where=path, field=entry.id, remedy="Keep one answer.")
        answers[entry.id] = entry.answer
    return answers
