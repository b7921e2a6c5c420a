"""Every error that reaches a user, as one tree.

DistillError
├── ConfigError            exit 2: what the user wrote is wrong (keys, files, data, models that do not fit together)
├── EnvironmentFault       exit 3: the machine cannot do it (port, disk, memory, a missing package)
│   └── MissingDependency
├── ServiceError           exit 4: something that we talk to failed
│   ├── ServerError            a model server died, refused or did not answer in time
│   ├── TeacherError           a teacher's weights or scores are not what they must be
│   │   └── TeacherDropped         it cannot be served, and the run is to go on without it
│   ├── StudentError           the training process died or produced numbers that cannot be used
│   │   └── PeerFault              a rank of the student stopped because of another one, which has the reason
│   ├── GraderError            a grader failed on an answer, or gave what is no mark
│   └── MeshError              weights did not reach a receiver
└── RunStopped             exit 128 + signal: the user stopped the run; it was saved first

Any other exception is a fault of ours: exit 1, with a traceback.

A ServiceError with a `sample_id` is the fault of that sample's data alone: whoever holds the sample may set it aside
and go on (see `distill.quarantine`). Without one the fault is of a server, a teacher or the student as a whole.

Each error says what happened and where, why that matters, and what to do. All of them survive pickling, because they
cross process borders. To add one: subclass the nearest class above and draw it here.
"""

from __future__ import annotations


class DistillError(Exception):
    """An error with a message for a person. `what` names the place; `why` and `fix` may be empty."""

    exit_code: int = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), dict(vars(self))))


def _rebuild(kind: type[DistillError], members: dict[str, object]) -> DistillError:
    error = kind.__new__(kind, members["what"])
    vars(error).update(members)
    return error


class ConfigError(DistillError):
    exit_code = 2


class EnvironmentFault(DistillError):
    exit_code = 3


class MissingDependency(EnvironmentFault):
    pass


class ServiceError(DistillError):
    """`sample_id` names the one sample that is at fault, `teacher` who scored it; both are empty otherwise."""

    exit_code = 4

    def __init__(self, what: str, *, why: str = "", fix: str = "", sample_id: str = "", teacher: str = "") -> None:
        super().__init__(what, why=why, fix=fix)
        self.sample_id = sample_id
        self.teacher = teacher


class ServerError(ServiceError):
    pass


class TeacherError(ServiceError):
    pass


class TeacherDropped(TeacherError):
    pass


class StudentError(ServiceError):
    pass


class PeerFault(StudentError):
    pass


class GraderError(ServiceError):
    pass


class MeshError(ServiceError):
    pass


class RunStopped(DistillError):
    """The user asked the run to stop. An instance's `exit_code` is 128 + the signal's number."""

    exit_code = 130
