"""A kept score is that of the same model, questions and options, or refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.kept_score import Subject, read_score, write_score
from demo_model.training.corpus import evaluation_set
from demo_model.training.evaluate import Score

SCORE = Score(9, 10, [{"asked": "What is 1 + 1?", "reply": "3\nÄ"}])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


def subject(model: Path, questions: int = 10, options: tuple[str, ...] = ("--x",)) -> Subject:
    return Subject.of(model, evaluation_set(questions), options)


def test_what_is_written_is_read_again(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "kept" / "reference.json"
    assert read_score(path, subject(model)) is None
    write_score(path, subject(model), SCORE)
    assert read_score(path, subject(model)) == SCORE
    assert subject(model) == subject(model)


def test_what_is_of_another_subject_is_refused(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "reference.json"
    write_score(path, subject(model), SCORE)
    with pytest.raises(ValueError, match="of other questions: remove"):
        read_score(path, subject(model, questions=11))
    with pytest.raises(ValueError, match="of other questions, options: remove"):
        read_score(path, subject(model, questions=11, options=()))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ValueError, match="of other model: remove"):
        read_score(path, subject(model))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"subject": {"options": []}, "score": {}}'])
def test_what_is_no_score_is_refused(tmp_path: Path, model: Path, text: str) -> None:
    path = tmp_path / "reference.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"reference\.json does not hold a score"):
        read_score(path, subject(model))


def test_a_field_too_many_is_no_score(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "reference.json"
    write_score(path, replace(subject(model), options=()), SCORE)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"score": fields["score"] | {"more": 1}}))
    with pytest.raises(ValueError, match="does not hold a score"):
        read_score(path, subject(model))
