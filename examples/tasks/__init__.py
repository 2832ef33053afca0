"""The paper's four tasks: data, model, optimizer, loss and metric of each."""

from __future__ import annotations

from training.settings import Settings

from tasks.base import Task, TaskError
from tasks.image_classification import ImageClassification
from tasks.question_answering import QuestionAnswering
from tasks.segmentation import Segmentation
from tasks.translation import Translation

__all__ = ["Task", "TaskError", "make_task"]

TASKS: dict[str, type[Task]] = {
    "image-classification": ImageClassification,
    "segmentation": Segmentation,
    "translation": Translation,
    "question-answering": QuestionAnswering,
}


def make_task(settings: Settings) -> Task:
    """Open a task's data set.

    Raises:
        DataError: Its files are missing or broken.
    """
    return TASKS[settings.task](settings)
