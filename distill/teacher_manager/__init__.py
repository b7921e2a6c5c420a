"""N teachers, M servers: `scheduler` decides whose turn it is, `slot` loads and checks, `manager` keeps promises.

`spelling` and `translation` are for teachers whose tokenizer is not the student's, `context` for those that read more
than the student does.
"""

from distill.teacher_manager.context import Context
from distill.teacher_manager.gate import CanaryStore
from distill.teacher_manager.manager import EventSink, SpanSink, TeacherManager
from distill.teacher_manager.own_prompts import OwnPrompts, RowPrompts
from distill.teacher_manager.scheduler import AnnouncedScheduler, Scheduler
from distill.teacher_manager.slot import Slot
from distill.teacher_manager.spelling import Spelling
from distill.teacher_manager.teachers import Teacher
from distill.teacher_manager.translation import Reader, Translation

__all__ = [
    "AnnouncedScheduler",
    "CanaryStore",
    "Context",
    "EventSink",
    "OwnPrompts",
    "Reader",
    "RowPrompts",
    "Scheduler",
    "Slot",
    "SpanSink",
    "Spelling",
    "Teacher",
    "TeacherManager",
    "Translation",
]
