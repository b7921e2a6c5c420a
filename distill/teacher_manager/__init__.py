"""N teachers, M slots: a policy in `planning` decides, `driver` carries out, `slot` checks, `manager` keeps promises.

`timeline` has the model that policies plan on; `spelling` and `translation` are for teachers whose tokenizer is not the
student's, `context` for those that read more than the student does.
"""

from distill.teacher_manager.catalogue import CPU, CUDA, Catalogue, Rates
from distill.teacher_manager.context import Context
from distill.teacher_manager.driver import RunPolicy
from distill.teacher_manager.gate import CanaryStore
from distill.teacher_manager.manager import TeacherManager
from distill.teacher_manager.own_prompts import OwnPrompts, RowPrompts
from distill.teacher_manager.slot import Slot
from distill.teacher_manager.spans import EventSink, SpanSink
from distill.teacher_manager.spelling import Spelling
from distill.teacher_manager.teachers import Teacher
from distill.teacher_manager.translation import Reader, Translation

__all__ = [
    "CPU",
    "CUDA",
    "CanaryStore",
    "Catalogue",
    "Context",
    "EventSink",
    "OwnPrompts",
    "Rates",
    "Reader",
    "RowPrompts",
    "RunPolicy",
    "Slot",
    "SpanSink",
    "Spelling",
    "Teacher",
    "TeacherManager",
    "Translation",
]
