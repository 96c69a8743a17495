"""A score that is kept in a file, with what it was of: the reference takes minutes to give it.

subject = Subject.of(folder, conversations, options)
score = read_score(path, subject)  # None where there is no file
write_score(path, subject, score)
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from demo_model.training.corpus import Conversation
from demo_model.training.evaluate import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Of what a score is: SHA-256 of a model's files and of the questions with their answers, and
    the options of the cluster that was asked. The code is no part of it."""

    model: str
    questions: str
    options: tuple[str, ...]

    @classmethod
    def of(
        cls, folder: Path, conversations: Sequence[Conversation], options: Sequence[str]
    ) -> "Subject":
        """Raises OSError for a folder that cannot be read."""
        model = hashlib.sha256()
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256")
            model.update(f"{file.name} {digest.hexdigest()}\n".encode())
        asked = "\n".join(repr(conversation) for conversation in conversations)
        return cls(
            model=model.hexdigest(),
            questions=hashlib.sha256(asked.encode()).hexdigest(),
            options=tuple(options),
        )


def read_score(path: Path, subject: Subject) -> Score | None:
    """None where there is no file. Raises ValueError for one of another subject, or that is none
    of `write_score`, and OSError."""
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        kept = Subject(**(fields["subject"] | {"options": tuple(fields["subject"]["options"])}))
        score = Score(**fields["score"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold a score: {error!r}") from error
    changed = [name for name, value in asdict(subject).items() if asdict(kept)[name] != value]
    if changed:
        raise ValueError(f"the score in {path} is of other {', '.join(changed)}: remove the file")
    return score


def write_score(path: Path, subject: Subject, score: Score) -> None:
    """Makes the folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {"subject": asdict(subject), "score": asdict(score)}
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
