"""N teachers, M servers: `scheduler` decides whose turn it is, `slot` loads and checks, `manager` keeps promises.

`spelling` and `translation` are for teachers whose tokenizer is not the student's.
"""

from distill.teacher_manager.gate import CanaryStore
from distill.teacher_manager.manager import EventSink, SpanSink, TeacherManager
from distill.teacher_manager.scheduler import AnnouncedScheduler, Scheduler
from distill.teacher_manager.slot import Slot
from distill.teacher_manager.spelling import Spelling
from distill.teacher_manager.teachers import Teacher
from distill.teacher_manager.translation import Translation

__all__ = [
    "AnnouncedScheduler",
    "CanaryStore",
    "EventSink",
    "Scheduler",
    "Slot",
    "SpanSink",
    "Spelling",
    "Teacher",
    "TeacherManager",
    "Translation",
]
